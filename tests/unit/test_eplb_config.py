"""What --eplb-config and its relatives may say, and what they are told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_runtime import cli
from moe_runtime.cli_peers import UNSUPPORTED
from moe_runtime.config import EngineConfig, EplbConfig
from moe_runtime.config_eplb import eplb_config
from moe_runtime.errors import ConfigError


def settings(*argv: str) -> EplbConfig:
    parser = cli.build_parser("serve.py", "Serves a model.", (EngineConfig,), "")
    return eplb_config(parser.parse_arguments(["--ep", "2", "--enable-eplb", *argv])[EngineConfig])


def test_vllms_fields_and_its_dotted_form() -> None:
    given = {
        "window_size": 500, "step_interval": 700, "num_redundant_experts": 3, "log_balancedness": True,
        "log_balancedness_interval": 9, "use_async": True, "policy": "default", "communicator": None,
    }  # fmt: skip
    whole = settings("--eplb-config", json.dumps(given))
    dotted = settings(
        "--eplb-config.window_size", "500", "--eplb-config.step-interval=700", "--eplb_config.num_redundant_experts", "3",
        "--eplb-config.log_balancedness", "true", "--eplb-config.log_balancedness_interval", "9",
    )  # fmt: skip
    assert whole == dotted == EplbConfig(500, 700, 3, True, 9)
    assert settings() == EplbConfig()


def test_a_mapping_from_python_and_from_a_settings_file(tmp_path: Path) -> None:
    flags = {"ep": 2, "enable_eplb": True, "eplb_config": {"window_size": 5, "log_balancedness": True}}
    wanted = EplbConfig(window_size=5, log_balancedness=True)
    assert eplb_config(cli.from_keywords(EngineConfig, flags)) == wanted
    (tmp_path / "settings.yaml").write_text("eplb-config:\n  window_size: 5\n  log_balancedness: true\n")
    assert settings("--config", str(tmp_path / "settings.yaml")) == wanted
    with pytest.raises(ConfigError, match="must be of type str"):
        cli.from_keywords(EngineConfig, {"model": {"window_size": 5}})


def test_sglangs_spellings() -> None:
    got = settings(
        "--eplb-rebalance-num-iterations", "77", "--eplb-min-rebalancing-utilization-threshold", "0.8",
        "--ep-num-redundant-experts", "4",
    )  # fmt: skip
    assert got == EplbConfig(step_interval=77, min_utilization=0.8, num_redundant_experts=4)
    assert "enable-eplb" not in UNSUPPORTED


@pytest.mark.parametrize(("name", "ours"), [("auto", "ours"), ("ours", "ours"), ("deepseek", "deepseek")])
def test_algorithms_by_the_names_of_sglang(name: str, ours: str) -> None:
    assert settings("--eplb-algorithm", name) == EplbConfig(algorithm=ours)
    assert settings("--eplb-config.algorithm", ours) == EplbConfig(algorithm=ours)


@pytest.mark.parametrize(
    "name", ["deepseek_hierarchical", "deepseek_vec", "deepseek_vec_hierarchical", "elasticity_aware"]
)
def test_algorithms_that_are_missing_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--eplb-algorithm {name} is not supported: .*use .*ours"):
        settings("--eplb-algorithm", name)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--eplb-algorithm", "rebalance"], "unknown name 'rebalance'; allowed are auto, ours, deepseek"),
        (["--eplb-algorithm", "deepseek", "--eplb-config.algorithm", "ours"], "they are one setting"),
        (["--eplb-config", "{"], "not JSON"),
        (["--eplb-config", "[1]"], "must be a JSON object"),
        (["--eplb-config", '{"windowsize": 1}'], "unknown field 'windowsize'; did you mean 'window_size'?"),
        (["--eplb-config", '{"zzz": 1}'], "unknown field 'zzz'; allowed are window_size"),
        (["--eplb-config", '{"window_size": 0}'], "window_size=0: must be at least 1"),
        (["--eplb-config", '{"window_size": "9"}'], "must be of type int"),
        (["--eplb-config", '{"window_size": null}'], "window_size has no value"),
        (["--eplb-config", '{"use_async": false}'], "use_async=false: allowed is true"),
        (["--eplb-config", '{"policy": "swift"}'], 'policy="swift": allowed is "default"'),
        (["--eplb-config", '{"communicator": "nixl"}'], "allowed is null"),
        (["--eplb-config", '{"min_gain": 2}'], "min_gain=2: must be from 0.0 to 1.0"),
        (
            ["--eplb-config", '{"step_interval": 5}', "--eplb-rebalance-num-iterations", "6"],
            "they are one setting",
        ),
        (
            ["--eplb-config", '{"num_redundant_experts": 5}', "--num-redundant-experts", "6"],
            "they are one setting",
        ),
        (["--eplb-config.window_size", "5", "--eplb-config.window_size", "6"], "given twice"),
        (["--eplb-config.window_size", "5", "--eplb-config", "{}"], "they are one setting"),
        (["--ep", "2", "--ep", "1"], "one setting"),
    ],
)
def test_mistakes_are_explained(argv: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*argv)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"enable_eplb": True, "ep": 1}, "nothing to balance with --ep 1"),
        ({"eplb_dry_run": True}, "--eplb-dry-run has no effect without --enable-eplb"),
        ({"eplb_config": "{}"}, "--eplb-config has no effect without --enable-eplb"),
        ({"eplb_min_rebalancing_utilization_threshold": 0.5}, "has no effect without --enable-eplb"),
    ],
)
def test_settings_that_do_nothing_are_refused(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        eplb_config(EngineConfig(**values))
