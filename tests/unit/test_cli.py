"""The command line: spellings, conflicts, settings files, messages, and a frozen list of flags."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moe_runtime import cli
from moe_runtime.cli_peers import NEGATIVES, UNSUPPORTED
from moe_runtime.config import EngineConfig, ServerConfig
from moe_runtime.errors import ConfigError

FLAG_LIST = Path(__file__).with_name("flags.txt")


def parser() -> cli.FlagParser:
    return cli.build_parser("serve.py", "Serves a model.", (EngineConfig, ServerConfig), "An example.")


def engine(*argv: str) -> EngineConfig:
    return parser().parse_arguments(argv)[EngineConfig]


def message(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parser().parse_arguments(argv)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_no_flags_gives_the_defaults() -> None:
    args = parser().parse_arguments([])
    assert args[EngineConfig] == EngineConfig()
    assert args[ServerConfig] == ServerConfig()
    assert args.given == frozenset()


def _some_value(f: dataclasses.Field[object], rng: random.Random) -> object:
    kind = str(f.type).replace(" | None", "")
    if f.metadata["choices"]:
        return rng.choice(f.metadata["choices"])
    if kind == "bool":
        return not f.default
    low, high = f.metadata["low"] or 0, f.metadata["high"]
    if kind == "int":
        return rng.randint(low, high or 10_000)
    if kind == "float":
        return rng.uniform(low, high or 1000.0)
    return f"text-{rng.randrange(100)}_x"


def test_every_spelling_sets_its_field(seed: int) -> None:
    rng = random.Random(seed)
    for kind in (EngineConfig, ServerConfig):
        for f in dataclasses.fields(kind):
            value = _some_value(f, rng)
            for name in (f.name, *f.metadata["aliases"]):
                for flag in (f"--{name.replace('_', '-')}", f"--{name.replace('-', '_')}"):
                    if isinstance(value, bool):
                        argv = [flag if value else flag.replace("--", rng.choice(["--no-", "--no_"]), 1)]
                    else:
                        argv = rng.choice([[flag, str(value)], [f"{flag}={value}"]])
                    args = parser().parse_arguments(argv)
                    assert getattr(args[kind], f.name) == value, argv
                    assert args.given == {f.name}


@pytest.mark.parametrize("flag", ["--cuda-graph-sizes", "--cudagraph-capture-sizes", "--cuda-graph-bs"])
def test_graph_sizes_as_words_or_with_commas(flag: str) -> None:
    assert engine(flag, "1", "2", "4", "--ep", "2").cuda_graph_sizes == "1,2,4"
    assert engine(flag, "1,2,4").cuda_graph_sizes == engine(f"{flag}=1,2,4").cuda_graph_sizes == "1,2,4"
    assert engine("--disable-cuda-graph").enforce_eager


def test_model_without_a_flag() -> None:
    assert engine("some/folder", "--ep", "2").model == "some/folder"
    assert engine("--ep", "2", "some/folder").model == "some/folder"
    assert engine("x", "--model", "x").model == "x"


@pytest.mark.parametrize("name", sorted(NEGATIVES))
def test_peers_negative_spellings(name: str) -> None:
    for negative in NEGATIVES[name]:
        args = parser().parse_arguments([f"--{negative}"])
        values = [getattr(args[k], name) for k in (EngineConfig, ServerConfig) if hasattr(args[k], name)]
        assert values == [False]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--ep", "2", "--ep-size", "3"], ["--ep", "2", "--ep-size", "3"]),
        (["--ep", "2", "--ep", "3"], ["--ep", "2", "3"]),
        (["a", "--model", "b"], ["MODEL", "--model", "a", "b"]),
        (["--enable-prefix-caching", "--disable-radix-cache"], ["--disable-radix-cache"]),
        (["--page_size=8", "--block-size", "16"], ["--page-size", "--block-size"]),
    ],
)
def test_one_setting_given_two_values_is_refused(argv: list[str], parts: list[str]) -> None:
    text = message(*argv)
    assert all(part in text for part in parts), text


def test_one_setting_given_one_value_twice_is_accepted() -> None:
    assert engine("--ep", "2", "--ep-size", "2").ep == 2


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--maxmodel-len", "3"], "--max-model-len"),
        (["--max-model-le", "3"], "--max-model-len"),
        (["--ep-siz=3"], "--ep-size"),
        (["--portt", "1"], "--port"),
        (["--tp", "2"], "tensor parallelism"),
        (["-tp", "2"], "tensor parallelism"),
        (["-q", "fp8"], "use --quantization"),
        (["--quantization", "awq"], "allowed are auto, none, fp8, fp8_channel, fp8_tensor, int8"),
        (["--eplb-config.window_size"], "--eplb-config.window-size: expected one argument"),
        (["--enable-chunked-prefill"], "always on"),
        (["--no-enable-chunked-prefill"], "always on"),
        (["--enable_expert_parallel"], "--ep"),
        (["--nnodes", "2"], "torchrun"),
        (["--disable-metrics"], "leave it out"),
        (["--api-server-count", "2"], "front-ends"),
        (["--prefill-attention-backend", "fa3"], "--attention-backend"),
        (["--data-parallel-size-local", "4"], "--nproc-per-node"),
        (["--port", "x"], "--port x: must be an integer"),
        (["--port", "0"], "from 1 to 65535"),
        (["--step-timeout", "soon"], "must be a number"),
        (["--dtype", "int3"], "bfloat16"),
        (["--port"], "--port"),
        (["a", "b"], "'b'"),
        (["--model", "a", "--prot", "80"], "nearest valid one is --port"),
        (["--enable-prefix-caching=no"], "--enable-prefix-caching"),
    ],
)
def test_mistakes_are_explained(argv: list[str], part: str) -> None:
    assert part in message(*argv)


def test_keyword_arguments_have_the_spellings_of_the_flags(seed: int) -> None:
    rng = random.Random(seed)
    for f in dataclasses.fields(EngineConfig):
        value = _some_value(f, rng)
        for name in (f.name, *(alias.replace("-", "_") for alias in f.metadata["aliases"])):
            assert getattr(cli.from_keywords(EngineConfig, {name: value}), f.name) == value
    assert cli.from_keywords(EngineConfig, {}) == EngineConfig()
    assert not cli.from_keywords(EngineConfig, {"disable_radix_cache": True}).enable_prefix_caching
    assert cli.from_keywords(EngineConfig, {"max_model_len": None}).max_model_len is None


@pytest.mark.parametrize(
    ("keywords", "part"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: not supported yet (tensor parallelism)"),
        ({"enable_expert_parallel": True}, "--ep N"),
        (
            {"max_model_length": 5},
            "unknown argument max_model_length; the nearest valid one is max_model_len",
        ),
        ({"ep": 2, "ep_size": 3}, "ep gives 2 and ep_size gives 3"),
        ({"disable_radix_cache": "yes"}, "True or False"),
        ({"ep": "2"}, "must be of type int"),
    ],
)
def test_mistakes_in_keyword_arguments(keywords: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.from_keywords(EngineConfig, keywords)
    assert part in str(caught.value)


def test_a_flag_like_none_of_ours_gets_no_false_hint() -> None:
    assert message("--zzzzqqqq") == "unknown flag --zzzzqqqq"


def test_no_peer_flag_hides_one_of_ours() -> None:
    assert not [flag for flag in parser().flags if flag.lstrip("-") in UNSUPPORTED]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_settings_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"settings.{suffix}"
    path.write_text(
        json.dumps(
            {"ep-size": 4, "max_model_len": 100, "disable-radix-cache": True, "port": 9000, "api_key": None}
        )
    )
    args = parser().parse_arguments(["--config", str(path), "--context-length", "50"])
    expected = EngineConfig(ep=4, max_model_len=50, enable_prefix_caching=False)
    assert args[EngineConfig] == expected, "the command line wins"
    assert args[ServerConfig] == ServerConfig(port=9000)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot: 1", "--port"),
        ("tensor_parallel_size: 2", "tensor parallelism"),
        ("ep: 2\nep-size: 3", "one setting"),
        ("ep: two", "ep='two'"),
        ("disable-radix-cache: 1", "true or false"),
        ("ep:", "no value"),
        ("- 1", "mapping"),
        ("a: [", "cannot be read"),
    ],
)
def test_mistakes_in_a_settings_file(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert part in message("--config", str(path))
    assert "cannot be read" in message("--config", str(tmp_path / "absent.yaml"))


def test_an_empty_settings_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("# nothing\n")
    assert parser().parse_arguments(["--config", str(tmp_path / "settings.yaml")]).given == frozenset()


def test_arguments_of_the_caller_come_back() -> None:
    made = cli.build_parser("generate.py", "Runs a batch.", (EngineConfig,))
    made.add_argument("--input", required=True)
    made.add_argument("--dry-run", action="store_true")
    args = made.parse_arguments(["--input", "a_b", "--ep=2", "--dry_run"])
    assert vars(args.rest) == {"input": "a_b", "dry_run": True}
    assert args[EngineConfig].ep == 2
    with pytest.raises(ConfigError, match="--input"):
        made.parse_arguments([])


def test_help_fits_80_columns_and_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.parse(parser(), ["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for kind in (EngineConfig, ServerConfig):
        for f in dataclasses.fields(kind):
            shown = [f"--{f.name}".replace("_", "-"), f"--[no-]{f.name}".replace("_", "-")]
            assert any(f"  {s}" in text for s in shown), f.name
            assert all(f"--{alias}" in text for alias in f.metadata["aliases"]), f.name
            assert f"{f.metadata['group']}:" in text
    assert "default: 8000" in text


def test_a_mistake_leaves_with_status_2_and_torch_is_not_imported() -> None:
    code = (
        "import sys; from moe_runtime import cli, config; "
        "p = cli.build_parser('serve.py', '', (config.EngineConfig, config.ServerConfig)); "
        "cli.parse(p, ['--ep', '2']); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); "
        "cli.parse(p, ['--ep', 'two'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("serve.py: error: --ep two: must be an integer\nusage: serve.py")
    assert "Traceback" not in done.stderr


def test_flags_change_only_on_purpose() -> None:
    """MOE_RUNTIME_UPDATE_FLAGS=1 rewrites the list."""
    made = parser()
    lines = [
        f"{name}: {' '.join(s for s in made.spellings if made.spellings[s] == name)}"
        for name in made.settings
    ]
    text = "\n".join(lines) + "\n"
    if os.environ.get("MOE_RUNTIME_UPDATE_FLAGS"):
        FLAG_LIST.write_text(text)
    assert FLAG_LIST.read_text() == text, (
        "flags changed; if on purpose: MOE_RUNTIME_UPDATE_FLAGS=1 pytest " + __file__
    )
