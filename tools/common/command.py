"""A command-line tool: its flags, its exit statuses, and one message for each mistake of a user.

    COMMAND = Command("check_mesh", __doc__)
    _VOCAB = COMMAND.integer("vocab", None, "Rows of the table. Default: unknown.", at_least=1)

    def main() -> int | None:
        print(_VOCAB.value)

    if __name__ == "__main__":
        COMMAND.run(main)

Exit statuses, the same for all tools: 0, done, or the answer is yes; 1, the answer is no (a layout
is rejected, a check failed); 2, the command line or what it names cannot be used: one message says
what is wrong, and there is no traceback. 130 after Ctrl-C, 141 where the reader of the output left.
A traceback is a fault of the tool's.
"""

import dis
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar, cast

from absl import flags

from tools.common import flag_values

DONE, NO, UNUSABLE = 0, 1, 2
INTERRUPTED, READER_LEFT = 130, 141

# Packages that a tool may import when it runs, and the extra that brings them.
EXTRAS = {"matplotlib": "train", "optax": "train", "pyarrow": "train", "rich": "train"}

# Packages whose errors are about what they were given, and say so.
_OURS = ("xrex", "pallas_kernels")

T = TypeVar("T")
D = TypeVar("D")
Main = Callable[[], int | None]


class UserError(ValueError):
    """A mistake of the user's. The message says what is wrong and what to do; notes are shown."""


def wrong_value(name: str, value: object, wanted: str) -> UserError:
    """The error about the value of one flag."""
    return UserError(f"--{name}={value}: {wanted}")


class Command:
    """One tool: its name, its help and its flags. Flags are defined before the tool runs."""

    def __init__(self, name: str, text: str | None, operand: str | None = None) -> None:
        """Makes a tool without flags.

        Args:
          name: what its messages begin with.
          text: what `--help` shows before the flags.
          operand: what the one argument without a flag is called; None where there is none.
        """
        self.name = name
        self.operand = ""
        self._operand = operand
        self.flags = flags.FlagValues()
        self.names: list[str] = []
        self._text = (text or "").strip()
        self._help = flags.DEFINE_boolean(
            "help", False, "Show this text.", short_name="h", flag_values=self.flags
        )

    def flag(
        self, name: str, default: D, text: str, parse: Callable[[str], T]
    ) -> flags.FlagHolder[T | D]:
        """Defines a flag; `parse` makes its value, or says in a ValueError what is wanted."""
        holder: Any = flags.DEFINE(
            _Parser(parse), name, default, text, flag_values=self.flags, serializer=None
        )
        self.names.append(name)
        return cast("flags.FlagHolder[T | D]", holder)

    def integer(
        self,
        name: str,
        default: D,
        text: str,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
    ) -> flags.FlagHolder[int | D]:
        """Defines a flag whose value is an integer."""
        return self.flag(name, default, text, flag_values.integer(at_least, at_most))

    def number(
        self,
        name: str,
        default: D,
        text: str,
        *,
        at_least: float | None = None,
        above: float | None = None,
        below: float | None = None,
    ) -> flags.FlagHolder[float | D]:
        """Defines a flag whose value is a finite number."""
        parse = flag_values.number(at_least=at_least, above=above, below=below)
        return self.flag(name, default, text, parse)

    def choice(
        self, name: str, default: D, values: Sequence[str], text: str
    ) -> flags.FlagHolder[str | D]:
        """Defines a flag whose value is one of some words."""
        return self.flag(
            name, default, f"One of {', '.join(values)}. {text}", flag_values.choice(*values)
        )

    def words(self, name: str, default: D, what: str, text: str) -> flags.FlagHolder[str | D]:
        """Defines a flag that takes any text but an empty one, such as "the name of a file"."""
        return self.flag(name, default, text, flag_values.words(what))

    def switch(self, name: str, default: bool, text: str) -> flags.FlagHolder[bool]:
        """Defines a flag that is on or off: --name, --noname."""
        holder = flags.DEFINE_boolean(name, default, text, flag_values=self.flags)
        self.flags[name].parser = _Parser(flag_values.switch)
        self.names.append(name)
        return holder

    def run(self, main: Main) -> NoReturn:
        """Runs the tool on the process' command line, and ends the process."""
        # A file's name need not be text, and output need not be UTF-8.
        for stream in (sys.stdout, sys.stderr):
            cast(Any, stream).reconfigure(errors="backslashreplace")
        status = self.status(main, sys.argv[1:])
        if status == READER_LEFT:
            # Python flushes once more as it ends, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(status)

    def status(self, main: Main, arguments: Sequence[str]) -> int:
        """Runs the tool on some arguments, and returns its exit status."""
        try:
            self.parse(arguments)
            if self._help.value:
                print(self.help_text())
                status = None
            else:
                status = main()
            sys.stdout.flush()
            return DONE if status is None else status
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            return READER_LEFT
        except OSError as error:
            return self._refuse(_os_text(error))
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            if extra is None:
                raise
            return self._refuse(f"needs {error.name}: pip install '.[{extra}]' brings it")
        except Exception as error:
            if isinstance(error, UserError) or _is_about_arguments(error):
                return self._refuse("\n".join([str(error), *_notes(error)]))
            if _is_lack_of_memory(error):
                return self._refuse(f"out of memory: choose smaller sizes ({error})")
            raise

    def parse(self, arguments: Sequence[str]) -> None:
        """Reads a command line; flags that it does not name have their defaults.

        Raises:
          UserError: a flag is unknown or has a wrong value, an argument belongs to no flag, or the
            operand is missing.
        """
        self.flags.unparse_flags()
        try:
            stray = self.flags([self.name, *arguments])[1:]
        except flags.UnrecognizedFlagError as error:
            close = " or ".join(f"--{name}" for name in str(error).partition("mean: ")[2].split())
            hint = f"did you mean {close.removesuffix(' or --?')}? " if close else ""
            raise UserError(
                f"--{error.flagname}: there is no such flag; {hint}--help lists all"
            ) from error
        except flags.Error as error:
            raise UserError(str(error).removeprefix("flag ")) from error
        self.operand = stray.pop(0) if self._operand and stray else ""
        if self._operand and not (self.operand or self._help.value):
            raise UserError(f"missing {self._operand}: --help says what it is")
        if stray:
            raise UserError(f"{stray[0]!r} belongs to no flag: flags are --name=value")

    def is_given(self, name: str) -> bool:
        """Whether the command line has the flag."""
        return not self.flags[name].using_default_value

    def help_text(self) -> str:
        """What `--help` prints: the tool's text, and each flag with its default."""
        parts = [self._text, "\nFlags:"]
        for name in self.names:
            default = self.flags[name].default
            shown = "" if default is None or default is False else f" (default: {_plain(default)})"
            parts.append(f"\n  --{name}")
            text = f"{self.flags[name].help}{shown}"
            parts.append(
                textwrap.fill(text, 96, initial_indent="      ", subsequent_indent=" " * 6)
            )
        return "\n".join(parts)

    def _refuse(self, message: str) -> int:
        print(f"{self.name}: {message}", file=sys.stderr)
        return UNUSABLE


class _Parser(flags.ArgumentParser[Any]):
    """A function as absl's parser. Defaults are values already."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        """Wraps `parse`."""
        super().__init__()
        self._parse = parse

    def parse(self, argument: Any) -> Any:
        """The value of a text, or the value itself."""
        return self._parse(argument) if isinstance(argument, str) else argument


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _os_text(error: OSError) -> str:
    """What the system says, with the name of the file first."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{os.fspath(error.filename)}: {error.strerror}"


def _notes(error: BaseException) -> list[str]:
    """The advice with an error; JAX notes on every error how it shortened the traceback."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if "JAX has removed its internal frames" not in note]


def _is_about_arguments(error: Exception) -> bool:
    """Whether the library raised this itself, in the way in which it refuses what it is given."""
    innermost = error.__traceback__
    if not isinstance(error, ValueError | TypeError | NotImplementedError) or innermost is None:
        return False
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    module = innermost.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return module in _OURS and _is_raise(innermost)


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether this machine, or a device of it, has too little memory."""
    # By name: a tool without JAX need not import it for its errors' sake.
    is_jax = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return isinstance(error, MemoryError) or (is_jax and "RESOURCE_EXHAUSTED" in str(error))


def _is_raise(traceback: TracebackType) -> bool:
    """Whether a `raise` stands there, rather than an operation that failed."""
    code = traceback.tb_frame.f_code.co_code
    return code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
