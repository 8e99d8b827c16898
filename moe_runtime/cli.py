"""Command lines made from the settings in `config.py`: flags, other spellings, a settings file, --help.

    parser = build_parser("serve.py", "Serves a model.", (EngineConfig, ServerConfig))
    args = parse(parser)
    engine, server = args[EngineConfig], args[ServerConfig]

Nothing here imports torch, so that a launcher can read its command line before it decides how to start.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from moe_runtime import __version__
from moe_runtime.cli_flags import (
    Given,
    base_type,
    convert,
    help_text,
    negative_flags,
    put,
    settings_of,
    spellings_of,
    why_unknown,
    with_hyphens,
)
from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

C = TypeVar("C")
HELP_WIDTH = 80


@dataclass(frozen=True)
class Arguments:
    """What a command line says. Index by a configuration class to get its object."""

    configs: Mapping[type, Any]
    given: frozenset[str]
    """Names of the settings that the command line or the settings file set, so not left at their default."""
    rest: argparse.Namespace
    """Arguments that the caller added to the parser."""

    def __getitem__(self, kind: type[C]) -> C:
        found: C = self.configs[kind]
        return found


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose settings come from configuration dataclasses; see `build_parser`."""

    def __init__(self, prog: str, description: str, configs: Sequence[type], epilog: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [MODEL] [--flag VALUE ...]",
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
            add_help=False,
        )
        self.config_classes = tuple(configs)
        self.settings = settings_of(configs)
        self.spellings = {s: name for name, f in self.settings.items() for s in spellings_of(f)}

    def error(self, message: str) -> NoReturn:
        """Instead of leaving the process, as argparse would."""
        raise ConfigError(message)

    def parse_arguments(self, argv: Sequence[str]) -> Arguments:
        """Raises ConfigError on anything that is not understood. Leaves the process on --help and --version."""
        arguments = [with_hyphens(a) for a in argv]
        try:
            namespace, unknown = self.parse_known_args(arguments)
        except ConfigError:
            # The value of an unknown flag was perhaps taken for MODEL; the mistake is the flag.
            flags = [a for a in arguments if a.startswith("--") and a.partition("=")[0] not in self.flags]
            if flags:
                self._refuse(flags)
            raise
        if unknown:
            self._refuse(unknown)
        given: dict[str, Given] = namespace.__dict__.pop("settings", {})
        if (file := namespace.__dict__.pop("config")) is not None:
            given = read_settings_file(self, Path(file)) | given
        values = {name: g.value for name, g in given.items()}
        configs = {}
        for kind in self.config_classes:
            names = {f.name for f in dataclasses.fields(kind)}
            configs[kind] = kind(**{n: v for n, v in values.items() if n in names})
        return Arguments(configs, frozenset(given), namespace)

    def _refuse(self, unknown: list[str]) -> NoReturn:
        flag = next((a for a in unknown if a.startswith("-")), None)
        if flag is None:
            raise ConfigError(f"unexpected argument {unknown[0]!r}: a value without a flag before it")
        raise ConfigError(why_unknown(flag.partition("=")[0], self.flags))

    @property
    def flags(self) -> list[str]:
        """Every flag that is understood, including those that the caller added."""
        return sorted(self._option_string_actions)


def build_parser(prog: str, description: str, configs: Sequence[type], epilog: str = "") -> FlagParser:
    """A parser with one flag per field of `configs` (dataclasses made with config.py's metadata).

    A field `a_b` gives `--a-b`; `--a_b` and the field's aliases mean the same. Booleans also have `--no-a-b`. A field named
    `model` may be given without a flag. The caller may add arguments of its own; they come back in `Arguments.rest`.
    """
    parser = FlagParser(prog, description, configs, epilog)
    groups: dict[str, Any] = {}
    for name, f in parser.settings.items():
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if name == "model":
            groups[title].add_argument(
                "model", nargs="?", metavar="MODEL", action=_Setting, field=f, help=argparse.SUPPRESS
            )
        _add_setting(groups[title], f)
    other = parser.add_argument_group("other")
    other.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file of settings, named as here; the command line wins"
    )
    other.add_argument("--version", action="version", version=__version__, help="Show the version and exit")
    other.add_argument("-h", "--help", action="help", help="Show this and exit")
    return parser


def parse(parser: FlagParser, argv: Sequence[str] | None = None) -> Arguments:
    """What the command line (default: this process's) says; on a mistake one line on standard error and exit status 2."""
    try:
        return parser.parse_arguments(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        sys.stderr.write(
            f"{parser.prog}: error: {error}\nusage: {parser.usage}   (see {parser.prog} --help)\n"
        )
        sys.exit(2)


def from_keywords(kind: type[C], values: Mapping[str, Any]) -> C:
    """A configuration from keyword arguments: any spelling of its flags, with underscores and without dashes.

    Raises ConfigError on one that does not exist (why not, if it is a well-known one), and on one setting given twice.
    """
    settings = settings_of((kind,))
    names = {s[2:].replace("-", "_"): name for name, f in settings.items() for s in spellings_of(f)}
    given: dict[str, Given] = {}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(why_unknown(key, names, "argument"))
        f = settings[names[key]]
        if f"--{key.replace('_', '-')}" in negative_flags(f):
            if not isinstance(value, bool):
                raise ConfigError(f"{key}={value!r}: must be True or False")
            value = not value
        put(given, f.name, Given(value, key))
    return kind(**{name: g.value for name, g in given.items()})


def read_settings_file(parser: FlagParser, path: Path) -> dict[str, Given]:
    """Settings from a JSON or YAML file: one mapping from names (any spelling of a flag, without dashes) to values.

    Raises ConfigError if it cannot be read or names a setting that does not exist, or one setting twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else _load_yaml(text)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from error
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must hold one mapping of setting names to values")
    given: dict[str, Given] = {}
    for key, value in loaded.items():
        spelling = f"--{str(key).replace('_', '-').lstrip('-')}"
        name = parser.spellings.get(spelling)
        if name is None:
            raise ConfigError(f"--config {path}: {why_unknown(spelling, parser.spellings)}")
        if value is None and "None" not in str(parser.settings[name].type):
            raise ConfigError(f"--config {path}: {key} has no value; leave it out for the default")
        if spelling in negative_flags(parser.settings[name]):
            if not isinstance(value, bool):
                raise ConfigError(f"--config {path}: {key}={value!r}: must be true or false")
            value = not value
        put(given, name, Given(value, f"{key} in {path}"))
    return given


def _load_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


class _Setting(argparse.Action):
    """Notes a value under the field's name, and refuses a second, different one."""

    def __init__(self, field: dataclasses.Field[Any], **options: Any) -> None:
        super().__init__(**{"default": argparse.SUPPRESS} | options)
        self.field = field
        self.negatives = frozenset(negative_flags(field))

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        spelling = option_string or self.metavar
        assert isinstance(spelling, str)
        value: Any
        if self.nargs == 0:
            value = spelling not in self.negatives
        elif values is None or values is argparse.SUPPRESS:
            return  # an optional positional that was not given
        else:
            value = convert(self.field, spelling, values)
        given = namespace.__dict__.setdefault("settings", {})
        put(given, self.field.name, Given(value, spelling))


_METAVARS = {"int": "N", "float": "X", "str": "TEXT"}


def _add_setting(group: Any, f: dataclasses.Field[Any]) -> None:
    kind, choices = base_type(f), f.metadata["choices"]
    options: dict[str, Any] = {"nargs": 0} if kind == "bool" else {}
    if kind != "bool":
        options["metavar"] = "{" + ",".join(choices) + "}" if choices else _METAVARS[kind]
    group.add_argument(*spellings_of(f), action=_Setting, field=f, dest=f.name, help=help_text(f), **options)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One spelling per setting in the left column; the others stand in the help text."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=HELP_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not isinstance(action, _Setting) or not action.option_strings:
            return super()._format_action_invocation(action)
        flag = action.option_strings[0]
        return f"--[no-]{flag[2:]}" if action.nargs == 0 else f"{flag} {action.metavar}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Without breaking flags at their hyphens."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)
