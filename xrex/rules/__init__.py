"""Update rules of embedding tables, one per file."""

from xrex.rules.base import TouchedRows, UpdateRule, saturate
from xrex.rules.rowwise_adagrad import RowwiseAdagrad, RowwiseAdagradState

__all__ = ["RowwiseAdagrad", "RowwiseAdagradState", "TouchedRows", "UpdateRule", "saturate"]
