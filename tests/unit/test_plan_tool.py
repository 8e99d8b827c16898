"""launch/plan.py: convert and plan, as a user types them."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from moe_runtime.placement.formats import read_file, read_placement, write_placement
from moe_runtime.placement.record import load_record
from moe_runtime.placement.stored import Model, StoredPlacement
from moe_runtime.tools.plan_plan import fullest_ratio
from moe_runtime.weights.identity import checkpoint_identity
from tests.helpers.placements import random_placement
from tests.helpers.records import write_random_record
from tests.helpers.tiny_models import make_tiny

main: Any = runpy.run_path(str(Path(__file__).parents[2] / "launch" / "plan.py"))["main"]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: object, status: int = 0) -> str:
        """What it prints: its result, or its error."""
        capsys.readouterr()
        try:
            code = main([str(a) for a in argv])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert code == status, err
        if status == 1:
            assert err.startswith("error: ")
            assert err.count("\n") == 1
        return out if status == 0 else err

    return run


def test_help_teaches(tool: Any) -> None:
    assert "launch/plan.py plan record -o placement.json" in tool("--help")
    for command in ("convert", "plan", "simulate"):
        text = tool(command, "--help")
        assert "examples\n" in text
        assert f"launch/plan.py {command}" in text
    assert "invalid choice: 'konvert'" in tool("konvert", status=2)
    assert "required: COMMAND" in tool(status=2)


def test_convert_with_a_model_of_which_some_layers_are_dense(tool: Any, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    make_tiny("qwen3_moe", tmp_path / "model", seed, num_hidden_layers=4, mlp_only_layers=[0], num_experts=6)
    placement = random_placement(draw, 3, 6, 2, 4)
    model = Model(6, 2, (1, 2, 3), 4, checkpoint_identity(tmp_path / "model"))
    write_placement(tmp_path / "a.json", placement, model, why=["for a test"])
    for suffix in ("pt", "yaml", "npz"):
        tool("convert", tmp_path / "a.json", tmp_path / f"b.{suffix}", "--model", tmp_path / "model")
        assert read_placement(tmp_path / f"b.{suffix}", model) == placement
        text = tool(
            "convert", tmp_path / f"b.{suffix}", tmp_path / "c.json", "--ep", 2, "--model", tmp_path / "model"
        )
        assert "3 layers, 6 experts, 2 ranks with 4 slots, 2 redundant experts: valid" in text
        stored = read_file(tmp_path / "c.json")
        assert isinstance(stored, StoredPlacement)
        assert stored.checkpoint == model.checkpoint
        assert read_placement(tmp_path / "c.json", model) == placement
    stored_yaml = read_file(tmp_path / "b.yaml")
    assert isinstance(stored_yaml, StoredPlacement)
    assert stored_yaml.layer_ids == (1, 2, 3)
    # The same told by flags.
    tool("convert", tmp_path / "a.json", tmp_path / "d.pt", "--moe-layers", "1-3", "--decoder-layers", 4)
    assert read_placement(tmp_path / "d.pt", model) == placement


def test_convert_takes_what_the_file_says(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    path.write_text("[[0, 1, 2, 0], [2, 1, 0, 1]]")
    assert "does not say how many ranks there are: give --ep N" in tool("convert", path, status=1)
    assert "vllm, 2 layers, 3 experts, 2 ranks with 2 slots, 1 redundant experts: valid" in tool(
        "convert", path, "--ep", 2
    )
    assert list(tmp_path.iterdir()) == [path]
    assert "MoE layer 0 has 4 slots, of which 3 ranks" in tool("convert", path, "--ep", 3, status=1)
    assert "expert 3 has no slot" in tool("convert", path, "--ep", 2, "--experts", 4, status=1)
    assert "has 2 layers; wanted 1" in tool("convert", path, "--ep", 2, "--moe-layers", 0, status=1)
    tool("convert", path, tmp_path / "ascend.json", "--ep", 2, "--to", "vllm_ascend")
    tool("convert", tmp_path / "ascend.json", tmp_path / "trt.yaml", "--from", "vllm_ascend")
    tool("convert", tmp_path / "trt.yaml", tmp_path / "back.json", "--to", "vllm", "--ep", 2)
    assert json.loads((tmp_path / "back.json").read_text()) == json.loads(path.read_text())
    path.write_text("[0, 1, 2, 0]")
    assert "one list for all layers: say which they are" in tool("convert", path, "--ep", 2, status=1)
    assert "5 layers, 3 experts" in tool("convert", path, "--ep", 2, "--moe-layers", "3-7")


def test_wrong_arguments(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[[0, 1]]")
    assert "--to needs OUT" in tool("convert", path, "--to", "vllm", status=1)
    assert "leave them out" in tool("convert", path, "--ep", 1, "--model", tmp_path, "--experts", 3, status=1)
    assert "must be an integer from 1" in tool("convert", path, "--ep", 0, status=2)
    assert "must be ascending numbers" in tool("convert", path, "--moe-layers", "3,1", status=2)
    assert "names layer 5" in tool(
        "convert", path, "--ep", 1, "--moe-layers", 5, "--decoder-layers", 3, status=1
    )
    path.write_text('{"logical_count": [[1, 2]]}')
    assert "`launch/plan.py plan` makes one" in tool("convert", path, "--ep", 1, status=1)


@pytest.mark.parametrize("algorithm", ["ours", "deepseek"])
def test_plan_from_a_record(algorithm: str, tool: Any, tmp_path: Path, seed: int) -> None:
    meta = write_random_record(tmp_path / "record", seed, num_ranks=2, checkpoint="a" * 64)
    out = tmp_path / "placement.json"
    text = tool(
        "plan",
        tmp_path / "record",
        "-o",
        out,
        "--ep",
        4,
        "--redundant",
        4,
        "--topology",
        "nodes=2x2",
        "--algorithm",
        algorithm,
    )
    assert "3 slots on each of 4 ranks" in text
    model = Model.of_moe_layers(meta.num_layers, meta.num_experts, 4, meta.checkpoint)
    placement = read_placement(out, model)
    load_LE = load_record(tmp_path / "record").loads.sum(axis=0)
    printed = [float(line.split()[-2]) for line in text.splitlines()[1:3]]
    assert printed[1] == pytest.approx(fullest_ratio(placement, load_LE).mean(), abs=5e-4)
    assert printed[1] <= printed[0]
    stored = read_file(out)
    assert isinstance(stored, StoredPlacement)
    assert stored.checkpoint == meta.checkpoint
    for layer, ranks in enumerate(placement.slots):
        for expert in range(meta.num_experts):
            where = [str(rank) for rank, experts in enumerate(ranks) if expert in experts]
            told = [s for s in stored.why if s.startswith(f"MoE layer {layer}: expert {expert} has")]
            assert len(told) == (len(where) > 1)
            assert not told or f"{len(where)} replicas (ranks {', '.join(where)})" in told[0]
    # Planned again from there, nothing moves.
    tool("plan", tmp_path / "record", "-o", tmp_path / "again.json", "--ep", 4, "--redundant", 4, "--topology", "nodes=2x2",
         "--algorithm", algorithm, "--current", out)  # fmt: skip
    assert read_placement(tmp_path / "again.json", model).slots == placement.slots


def test_plan_from_statistics_of_peers(tool: Any, tmp_path: Path, seed: int) -> None:
    counts_LE = np.random.default_rng(seed).integers(1, 100, (3, 6))
    np.savez(tmp_path / "weight.npz", weight=counts_LE)
    (tmp_path / "sglang.json").write_text(json.dumps({"logical_count": [counts_LE.tolist()] * 2}))
    assert "give --ep N" in tool("plan", tmp_path / "weight.npz", "-o", tmp_path / "p.pt", status=1)
    for source in ("weight.npz", "sglang.json"):
        tool("plan", tmp_path / source, "-o", tmp_path / f"{source}.pt", "--ep", 3)
    model = Model.of_moe_layers(3, 6, 3)
    assert read_placement(tmp_path / "weight.npz.pt", model) == read_placement(
        tmp_path / "sglang.json.pt", model
    )
    # A row of zeros for the layer without experts.
    (tmp_path / "dense.json").write_text(json.dumps({"logical_count": [[0] * 6, *counts_LE.tolist()]}))
    tool(
        "plan",
        tmp_path / "dense.json",
        "-o",
        tmp_path / "p.json",
        "--ep",
        3,
        "--moe-layers",
        "1-3",
        "--decoder-layers",
        4,
    )
    assert read_placement(tmp_path / "p.json", Model(6, 3, (1, 2, 3), 4)) == read_placement(
        tmp_path / "weight.npz.pt", model
    )


def test_plans_that_cannot_be(tool: Any, tmp_path: Path, seed: int) -> None:
    record, out = tmp_path / "record", tmp_path / "p.json"
    write_random_record(record, seed, checkpoint="a" * 64)
    assert "--topology nodes=2x8 has 16 ranks, --ep 2" in tool(
        "plan", record, "-o", out, "--topology", "nodes=2x8", status=1
    )
    assert "9 redundant experts do not fit" in tool("plan", record, "-o", out, "--redundant", 9, status=1)
    assert "record.json cannot be read" in tool("plan", tmp_path, "-o", out, status=1)
    make_tiny("mixtral", tmp_path / "model", seed)
    assert "recorded with another checkpoint than" in tool(
        "plan", record, "-o", out, "--model", tmp_path / "model", status=1
    )
    write_random_record(tmp_path / "empty", seed, num_windows=0)
    assert "is empty: no step was recorded" in tool("plan", tmp_path / "empty", "-o", out, status=1)
    (tmp_path / "map.json").write_text("[[0]]")
    assert "holds a placement (vllm), not loads" in tool("plan", tmp_path / "map.json", "-o", out, status=1)
    assert not out.exists()


def test_peers_get_no_plan_with_empty_slots(tool: Any, tmp_path: Path, seed: int) -> None:
    write_random_record(tmp_path / "record", seed)
    text = tool("plan", tmp_path / "record", "-o", tmp_path / "p.pt", "--ep", 3, status=1)
    assert "sglang_pt has no empty slots, but MoE layer 0, rank" in text
    tool("plan", tmp_path / "record", "-o", tmp_path / "p.pt", "--ep", 3, "--redundant", 1)


def test_simulate(tool: Any, tmp_path: Path, seed: int) -> None:
    record = tmp_path / "record"
    write_random_record(record, seed, num_windows=6)
    text = tool(
        "simulate", record, "--ep", "2,4", "--redundant", "0,4", "--topology", "nodes=2x2", "--hardware", "cpu",
        "--algorithm", "contiguous,deepseek,ours", "--split", "static,waterfill", "--json", tmp_path / "out.json",
        "--svg", tmp_path / "out.svg",
    )  # fmt: skip
    assert "random, all tokens, on cpu: 3 windows judged" in text
    outcomes = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert len(text.splitlines()) == 2 + len(outcomes) == 2 + 2 * 2 * 3 * 2
    # Bytes between nodes only where there are two.
    assert all((sum(o["internode_bytes_per_step"]) > 0) == (o["ep"] == 4) for o in outcomes)
    # The split at run time never makes the fullest rank fuller, for the same placement.
    for static, filled in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert static["balancedness"] <= filled["balancedness"] + 1e-9
    assert (tmp_path / "out.svg").read_text().startswith("<svg ")
    assert all(" waterfill " in line for line in tool("simulate", record).splitlines()[2:])
    write_random_record(record, seed, num_windows=6, split="static")
    assert all(" static " in line for line in tool("simulate", record).splitlines()[2:])


def test_simulations_that_cannot_be(tool: Any, tmp_path: Path, seed: int) -> None:
    record = tmp_path / "record"
    write_random_record(record, seed)
    for argv, message in [
        (["--ep", "0"], "--ep 0: there must be at least one rank"),
        (["--ep", "3", "--topology", "nodes=2x2"], "--ep 3 does not fit --topology nodes=2x2"),
        (["--algorithm", "best"], "--algorithm best: choose from ours, deepseek, contiguous"),
        (["--split", "fair"], "--split fair: choose from static"),
        (["--redundant", "9"], "9 redundant experts do not fit: 8 experts on 2 ranks allow at most 8"),
        (["--ep", "9"], "gives every rank a slot, but there are 8 slots for 9 ranks"),
        (["--hardware", "h300"], "hardware 'h300': choose from h200, b200, cpu, or name a .yaml file"),
        (["--hardware", "absent.yaml"], "hardware file 'absent.yaml' cannot be read"),
        (["--topology", "4x8"], "topology '4x8' must look like nodes=4x8"),
        (["--ep", "3", "--algorithm", "deepseek"], "ranks with different numbers of slots (8 slots on 3 ranks: give a multiple of 3); choose 'ours'"),
        (["--json", str(tmp_path / "absent" / "x.json")], "cannot be written"),
    ]:  # fmt: skip
        assert message in tool("simulate", record, *argv, status=1)
    assert "invalid choice" in tool("simulate", record, "--phase", "both", status=2)
    assert "must be an integer" in tool("simulate", record, "--ep", "2,x", status=2)
    np.savez(tmp_path / "weight.npz", weight=np.ones((1, 2)))
    assert "has sums only; this needs a record" in tool("simulate", tmp_path / "weight.npz", status=1)


def test_records_that_are_none(tool: Any, tmp_path: Path, seed: int) -> None:
    """One line for each, from simulate and report alike."""
    sound = tmp_path / "sound"
    write_random_record(sound, seed)
    meta = json.loads((sound / "record.json").read_text())
    with np.load(sound / "rank1.npz") as file:
        arrays = dict(file)
    whole = (sound / "rank1.npz").read_bytes()

    def refused(message: str) -> None:
        for argv in (["simulate", record], ["report", record, "-o", tmp_path / "out"]):
            error = tool(*argv, status=1)
            assert message in error
            assert str(record) in error

    for number, (changes, message) in enumerate([
        ({"num_ranks": 0}, "num_ranks is 0, must be at least 1"),
        ({"hidden_size": -1}, "hidden_size is -1, must be at least 1"),
        ({"num_ranks": 3}, "placement 0 must have 3 layers of 3 ranks with equally many slots"),
        ({"placements": []}, "record.json: placements is empty"),
        ({"placements": [[[[0, 9], [1, 2]]] * 3]}, "placement 0 has expert 9; allowed are -1 to 7"),
        ({"split": "best"}, "split 'best' must be one of auto, dynamic, static, random"),
        ({"version": 2}, "has version 2; this program reads version 1"),
        ({"top_k": "two"}, "record.json: Expected `int`, got `str`"),
    ]):  # fmt: skip
        record = copytree(sound, tmp_path / f"meta{number}")
        (record / "record.json").write_text(json.dumps(meta | changes))
        refused(message)
    for number, (name, change, message) in enumerate([
        ("tokens_WP", lambda x: x[:, :1], "tokens_WP is int64 of shape (4, 1), wanted finite numbers of shape (4, 2)"),
        ("counts_WPLE", lambda x: -x - 1, "counts_WPLE has values from"),
        ("end_time_W", lambda x: x * np.nan, "end_time_W is float64 of shape (4,), wanted finite numbers"),
        ("placement_W", lambda x: x + 1, "placement_W has values from 1 to 1, allowed are -1 to 0"),
        ("wait_us_W", lambda x: x.astype(str), "wait_us_W is <U21 of shape (4,), wanted finite numbers"),
        ("routes_topk_ids_tLK", lambda _: np.zeros((1, 3, 2)), "wanted finite numbers of shape (0, 3, 2)"),
        ("first_step_W", lambda x: x + 1, "ranks 0 and 1 did not record the same steps"),
    ]):  # fmt: skip
        record = copytree(sound, tmp_path / f"array{number}")
        np.savez(record / "rank1.npz", **{**arrays, name: change(arrays[name])})
        refused(message)
    record = tmp_path / "routes"
    copytree(sound, record)
    routes = {"step_t": [0], "phase_t": [0], "request_t": [0], "topk_ids_tLK": [[[0, 8]] * 3]}
    np.savez(record / "rank1.npz", **arrays | {f"routes_{name}": np.array(x) for name, x in routes.items()})
    refused("routes_topk_ids_tLK has values from 0 to 8, allowed are -1 to 7")
    for length in (0, 10, len(whole) // 2, len(whole) - 5):
        (record / "rank1.npz").write_bytes(whole[:length])
        refused("rank1.npz: is damaged")
    (record / "rank1.npz").unlink()
    refused("rank1.npz: cannot be read")
    record = tmp_path / "empty"
    write_random_record(record, seed, num_windows=0)
    refused("is empty: no step was recorded")
