"""What --eplb-config may say, and the settings of --enable-eplb put together."""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from typing import Any

from moe_runtime.config import EngineConfig, EplbConfig
from moe_runtime.errors import ConfigError

_ELSEWHERE = {
    "policy": ("default",),
    "use_async": (True,),
    "communicator": (None,),
}
"""vLLM's fields with one meaning only here, and the values that have it."""
_ALGORITHMS = {"auto": "ours", "ours": "ours", "deepseek": "deepseek"}
_NO_ALGORITHMS = {
    "deepseek_hierarchical": "groups of experts are not kept on one node; use deepseek, or ours, which knows of nodes",
    "deepseek_vec": "use ours, which plans from several windows of load",
    "deepseek_vec_hierarchical": "use ours, which plans from several windows of load and knows of nodes",
    "elasticity_aware": "the ranks that there are at the start stay; use ours",
}
"""SGLang's that are missing, and what to use instead."""
_ONLY_WITH_EPLB = (
    "eplb_algorithm",
    "eplb_config",
    "eplb_dry_run",
    "eplb_rebalance_num_iterations",
    "eplb_min_rebalancing_utilization_threshold",
)


def eplb_config(config: EngineConfig) -> EplbConfig:
    """The settings of rebalancing. Raises ConfigError on what is not understood, or said twice and differently."""
    given = _parse(config.eplb_config)
    for name, text, value in (
        ("num_redundant_experts", "--num-redundant-experts", config.num_redundant_experts or None),
        ("algorithm", "--eplb-algorithm", _algorithm(config.eplb_algorithm)),
        ("step_interval", "--eplb-rebalance-num-iterations", config.eplb_rebalance_num_iterations),
        (
            "min_utilization",
            "--eplb-min-rebalancing-utilization-threshold",
            config.eplb_min_rebalancing_utilization_threshold,
        ),
    ):
        if value is None:
            continue
        if given.setdefault(name, value) != value:
            raise ConfigError(
                f"{text} gives {value} and {name} in --eplb-config gives {given[name]}: they are one setting"
            )
    try:
        settings = EplbConfig(**given)
    except ConfigError as error:
        raise ConfigError(f"--eplb-config: {error}") from error
    if config.enable_eplb and config.ep == 1:
        raise ConfigError(
            "--enable-eplb: there is nothing to balance with --ep 1; use more ranks, or leave it out"
        )
    if not config.enable_eplb:
        asked = [name for name in _ONLY_WITH_EPLB if getattr(config, name) not in (None, False)]
        if asked:
            flag = f"--{asked[0].replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect without --enable-eplb; give that too, or leave it out")
    return settings


def _algorithm(name: str | None) -> str | None:
    """From SGLang's names, and ours."""
    if name is None:
        return None
    if name in _NO_ALGORITHMS:
        raise ConfigError(f"--eplb-algorithm {name} is not supported: {_NO_ALGORITHMS[name]}")
    if name not in _ALGORITHMS:
        raise ConfigError(f"--eplb-algorithm: unknown name {name!r}; allowed are {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[name]


def _parse(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--eplb-config: not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError('--eplb-config: must be a JSON object, such as {"step_interval": 3000}')
    names = [f.name for f in fields(EplbConfig)]
    for name in list(given):
        if name in _ELSEWHERE:
            if given[name] not in _ELSEWHERE[name]:
                allowed = " or ".join(json.dumps(v) for v in _ELSEWHERE[name])
                raise ConfigError(f"--eplb-config: {name}={json.dumps(given[name])}: allowed is {allowed}")
            del given[name]
        elif name not in names:
            near = difflib.get_close_matches(str(name), [*names, *_ELSEWHERE], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; allowed are {', '.join(names)}"
            raise ConfigError(f"--eplb-config: unknown field {name!r}{hint}")
    for name, value in given.items():
        if value is None:
            raise ConfigError(f"--eplb-config: {name} has no value; leave it out for the default")
    return given
