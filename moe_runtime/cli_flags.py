"""How a setting of `config.py` is spelt as a flag, and what is said of a flag that is not known. For `cli.py`."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_runtime.cli_peers import NEGATIVES, UNSUPPORTED
from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True)
class Given:
    """A value for one setting and the spelling it was given under."""

    value: Any
    spelling: str


def why_unknown(flag: str, flags: Iterable[str], what: str = "flag") -> str:
    """The message for a flag that is not understood: why it is not, if it is a well-known one, and the nearest that is."""
    # vLLM also writes the keys of a JSON setting with dots: --eplb-config.window_size.
    bare = flag.lstrip("-").replace("_", "-").partition(".")[0]
    for name in (bare, bare.removeprefix("no-")):
        if name in UNSUPPORTED:
            return f"{flag}: {UNSUPPORTED[name]}"
    near = difflib.get_close_matches(flag, list(flags), n=1, cutoff=0.5)
    hint = f"; the nearest valid one is {near[0]}" if near else ""
    return f"unknown {what} {flag}{hint}"


def with_hyphens(argument: str) -> str:
    """`--max_model_len=5` as `--max-model-len=5`; values are left alone."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def settings_of(configs: Sequence[type]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of all `configs`, by name."""
    return {f.name: f for kind in configs for f in dataclasses.fields(kind)}


def base_type(f: dataclasses.Field[Any]) -> str:
    """`int` for `int | None`."""
    return str(f.type).replace(" | None", "")


def positive_flags(f: dataclasses.Field[Any]) -> list[str]:
    """Its flag and the aliases of that."""
    return [f"--{name.replace('_', '-')}" for name in (f.name, *f.metadata["aliases"])]


def negative_flags(f: dataclasses.Field[Any]) -> list[str]:
    """The flags that switch a boolean off; none for other types."""
    if base_type(f) != "bool":
        return []
    return [flag.replace("--", "--no-", 1) for flag in positive_flags(f)] + [
        f"--{negative}" for negative in NEGATIVES.get(f.name, ())
    ]


def spellings_of(f: dataclasses.Field[Any]) -> list[str]:
    """All its flags."""
    return positive_flags(f) + negative_flags(f)


def put(given: dict[str, Given], name: str, new: Given) -> None:
    """Note a value in `given`. Raises ConfigError if the setting has another one already."""
    old = given.get(name)
    if old is not None and old.value != new.value:
        raise ConfigError(
            f"{old.spelling} gives {old.value} and {new.spelling} gives {new.value}: they are one setting"
        )
    given[name] = new


def convert(f: dataclasses.Field[Any], spelling: str, text: str) -> Any:
    """A value as its type. Raises ConfigError."""
    kind = base_type(f)
    if kind == "str":
        return text
    try:
        return {"int": int, "float": float}[kind](text)
    except ValueError:
        what = "an integer" if kind == "int" else "a number"
        raise ConfigError(f"{spelling} {text}: must be {what}") from None


def help_text(f: dataclasses.Field[Any]) -> str:
    """Help text with the default and the other spellings."""
    notes = []
    if f.default is not None and "default:" not in f.metadata["help"]:
        words = {"True": "on", "False": "off", "": "empty"}
        notes.append(f"default: {words.get(str(f.default), f.default)}")
    if aliases := positive_flags(f)[1:]:
        notes.append(f"also {', '.join(aliases)}")
    if negatives := NEGATIVES.get(f.name):
        notes.append(f"off also by {', '.join(f'--{n}' for n in negatives)}")
    text = str(f.metadata["help"]) + (f" ({'; '.join(notes)})" if notes else "")
    return text.replace("%", "%%")
