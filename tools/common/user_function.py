"""A function of the user's, named MODULE:FUNCTION on a command line."""

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.common.command import UserError

_NOT_THEIRS = (str(Path(__file__).parent.parent), "site-packages", "<frozen ")


def find(named: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names.

    Raises:
      UserError: there is no such module or function; the message says what is missing.
    """
    module_name, colon, name = named.partition(":")
    if not (module_name.strip() and colon and name.strip()):
        raise UserError(f"{named}: wanted MODULE:FUNCTION, such as my_package.my_module:make")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{named}: there is no module {error.name!r} to import: run the command where "
                "the module lies, or set PYTHONPATH"
            ) from error
        raise _raised(named, "importing it", error) from error
    # Whatever it raises is its author's to look at; SystemExit is what scripts raise on import.
    except (Exception, SystemExit) as error:
        raise _raised(named, "importing it", error) from error
    function = getattr(module, name, None)
    if function is None:
        raise UserError(f"{named}: module {module_name!r} has no function {name!r}")
    if not callable(function):
        raise UserError(f"{named}: {name!r} is no function, but of type {type(function).__name__}")
    found: Callable[..., Any] = function
    return found


def call(named: str, *arguments: Any) -> Any:
    """Calls the function that `MODULE:FUNCTION` names, and returns what it returns.

    Raises:
      UserError: there is no such function, or it raised; the message says what and where.
    """
    function = find(named)
    with blamed(named, "calling it"):
        return function(*arguments)


@contextlib.contextmanager
def blamed(named: str, when: str) -> Iterator[None]:
    """Makes a UserError of whatever the user's function raises within.

    Raises:
      UserError: something was raised; the message says what and where.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(named, when, error) from error


def _raised(named: str, when: str, error: BaseException) -> UserError:
    # The user's line is the last one outside of this project's and JAX's own files.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _NOT_THEIRS)
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    first_line = str(error).partition("\n")[0]
    return UserError(f"{named}: {when} raised {type(error).__name__}: {first_line}{place}")
