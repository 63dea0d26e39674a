"""Tables and features: many tables in few arrays, and batches packed for them."""
