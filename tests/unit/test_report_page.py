"""launch/plan.py report: its files, and its page in a real browser."""

from __future__ import annotations

import html
import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_runtime.placement.formats import read_file
from moe_runtime.placement.record import load_record
from moe_runtime.placement.report_data import Prediction, Report
from moe_runtime.tools import plan_report
from tests.helpers.load_records import make_record, stationary, write_record

main: Any = runpy.run_path(str(Path(__file__).parents[2] / "launch" / "plan.py"))["main"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = 390


@pytest.fixture
def folder(tmp_path: Path, seed: int) -> Path:
    """A report with everything in it: redundant experts, routes, an audit."""
    popularity = stationary(24, 3, 8, 0.3, seed)
    record = write_record(make_record(popularity, seed, num_ranks=2, num_routes=100), tmp_path / "record")
    assert main(["report", str(record), "-o", str(tmp_path / "first"), "--redundant", "2"]) == 0
    placement = plan_report.read_placement(
        tmp_path / "first" / "placement.json", plan_report.model_of_record(load_record(record))
    )
    second = make_record(popularity, seed + 1, num_ranks=2, num_routes=100, placements=(placement,))
    write_record(second, tmp_path / "second")
    applied = str(tmp_path / "first" / "placement.json")
    assert main(["report", str(tmp_path / "second"), "-o", str(tmp_path / "out"), "--applied", applied]) == 0
    return tmp_path


def embedded(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_files_agree(folder: Path) -> None:
    out = folder / "out"
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    numbers = json.loads((out / "report.json").read_text())
    assert embedded(page) == numbers
    report = msgspec.convert(numbers, Report)
    verdict = report.verdict
    for shown in (page, text):
        assert verdict.word in shown
        assert plan_report.percent(verdict.gain.mean) in shown
        assert (
            f"{plan_report.percent(verdict.gain.low)} to {plan_report.percent(verdict.gain.high)}"
            in shown.replace("\n", " ")
        )
    assert report.audit is not None
    stored = read_file(folder / "first" / "placement.json")
    predicted = msgspec.convert(stored.prediction, Prediction)
    assert report.audit.predicted == predicted.gain
    assert all(reason.why in text for reason in report.reasons)


def test_the_page_needs_nothing_else_and_trusts_nothing(folder: Path) -> None:
    page = (folder / "out" / "report.html").read_text()
    assert "Expert placement of &lt;b&gt;made&lt;/b&gt; &amp; up" in page
    assert "<b>made" not in page
    assert not re.search(
        r"""(?:src|href)\s*=\s*["'](?!data:,)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", page
    )


def test_a_large_model_stays_below_3_megabytes(tmp_path: Path, seed: int) -> None:
    """58 layers, 256 experts, 64 ranks: an analysed small record, blown up."""
    record = make_record(stationary(8, 1, 8, 0.3, seed), seed, num_ranks=2)
    write_record(record, tmp_path / "record")
    assert main(["report", str(tmp_path / "record"), "-o", str(tmp_path / "out"), "--redundant", "2"]) == 0
    small = msgspec.json.decode((tmp_path / "out" / "report.json").read_bytes(), type=Report)
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> list[list[float]]:
        return draw.random((rows, columns)).tolist()

    counts = draw.integers(1, 5, (58, 256)).tolist()
    square = {name: matrix(64, 64) for name in small.between.__struct_fields__ if name.endswith("_NN")}
    layers = msgspec.structs.replace(
        small.layers, load_LE=matrix(58, 256), replicas_before_LE=counts, replicas_after_LE=counts,
        fullest_before_L=draw.random(58).tolist(), fullest_after_L=draw.random(58).tolist(), unused_L=[0] * 58,
    )  # fmt: skip
    report = msgspec.structs.replace(
        small,
        layers=layers,
        reasons=small.reasons[:1] * (58 * 64),
        between=msgspec.structs.replace(
            small.between, **square, measured_wait_us_N=draw.random(64).tolist(),
            measured_forward_us_N=draw.random(64).tolist(),
        ),
        over_time=msgspec.structs.replace(
            small.over_time, seconds_T=list(range(48)), before_TN=matrix(48, 64), after_TN=matrix(48, 64)
        ),
    )  # fmt: skip
    page = plan_report.page(report)
    assert len(page.encode()) < 3e6
    check_in_browser(page, tmp_path)


def test_the_page_on_a_phone(folder: Path) -> None:
    check_in_browser((folder / "out" / "report.html").read_text(), folder)


def check_in_browser(page: str, folder: Path) -> None:
    """Draws everything, says nothing on the console, and at a phone's width, tables opened or not, does not scroll sideways and has
    no text that is cut, lies on another or repeats its neighbour along an axis."""
    seen = browse(page, folder)
    numbers = embedded(page)
    assert seen["errors"] == []
    for when in ("closed", "opened"):
        assert seen[when]["scroll"] <= PHONE, seen
        assert seen[when]["bad"] == []
    assert seen["closed"]["empty"] == []
    assert seen["closed"]["charts"] >= 13
    assert seen["opened"]["cells"] > len(numbers["layers"]["load_LE"]) * 4


# Waits for the charts, then opens all tables; the frame may be read because srcdoc has the origin of the page around it.
WRAPPER = """<!DOCTYPE html><body style="margin:0"><iframe id="frame" style="width:%dpx;height:800px;border:0" srcdoc="%s"></iframe>
<pre id="seen"></pre><script>
const frame = document.getElementById("frame");
function look() {
  const d = frame.contentDocument;
  const bad = [];
  for (const s of d.querySelectorAll(".labels span")) {
    if (frame.contentWindow.getComputedStyle(s).visibility === "visible" && s.scrollWidth > s.clientWidth) bad.push(["cut", s.textContent]);
  }
  for (const svg of d.querySelectorAll("figure svg")) {
    const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]), edge = svg.getBoundingClientRect();
    texts.forEach(([a, p], i) => {
      if (p.left < edge.left - 1 || p.right > edge.right + 1) bad.push(["outside", a]);
      for (const [b, q] of texts.slice(i + 1)) {
        if (p.left + 1 < q.right && q.left + 1 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom) bad.push(["overlap", a, b]);
        if (a === b && Math.abs(p.right - q.right) < 1) bad.push(["repeated", a]);
      }
    });
  }
  const drawn = node => node.tagName === "svg" ? node.childElementCount > 0 : node.width > 0 && node.height > 0;
  const charts = [...d.querySelectorAll("figure svg, figure .cells canvas")];
  return { bad, scroll: d.documentElement.scrollWidth, charts: charts.length, empty: [...d.querySelectorAll("figure")].filter(f =>
    !f.querySelector("svg, canvas")).map(f => f.id).concat(charts.filter(c => !drawn(c)).map(c => c.outerHTML.slice(0, 80))), cells: d.querySelectorAll("td").length };
}
frame.onload = () => setTimeout(() => {
  const seen = { closed: look() };
  for (const details of frame.contentDocument.querySelectorAll("details")) details.open = true;
  setTimeout(() => { seen.opened = look(); document.getElementById("seen").textContent = JSON.stringify(seen); }, 500);
}, 1000);
</script></body>"""


def browse(page: str, folder: Path) -> dict[str, Any]:
    """What a browser makes of the page in a frame as wide as a phone."""
    if CHROMIUM is None:
        pytest.skip("no chromium to open the page in")
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER % (PHONE, html.escape(page)))
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=10000"
    )
    done = subprocess.run(
        [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom", wrapper.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    seen: dict[str, Any] = json.loads(html.unescape(text))
    seen["errors"] = re.findall(r".*CONSOLE.*", done.stderr)
    return seen


def test_the_browser_check_can_fail(folder: Path) -> None:
    page = (folder / "out" / "report.html").read_text()
    assert browse(page.replace("losses();\n", "losses(); nonsense();\n"), folder)["errors"]
    wide = page.replace("</main>", '<div style="width:500px">wide</div></main>')
    assert browse(wide, folder)["closed"]["scroll"] > PHONE
    crowded = page.replace("- x(wanted[i - 1]) > 20", "- x(wanted[i - 1]) > -1").replace(
        "at: points.map(p => p[0])", "at: numbers(80).map(i => i / 10)"
    )
    crowded = crowded.replace("clientWidth < wide * columns", "clientWidth < columns").replace(
        "say = short", "say = () => 1"
    )
    assert {what for what, *_ in browse(crowded, folder)["closed"]["bad"]} >= {"overlap", "cut", "repeated"}


def test_what_cannot_be_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: object) -> str:
        capsys.readouterr()
        assert main(["report", str(folder / "record"), "-o", str(folder / "no"), *map(str, argv)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    assert "ep 2" in refused("--topology", "nodes=2x8")
    assert "leave one of them out" in refused("--placement", folder / "x", "--redundant", 1)
    bare = json.loads((folder / "first" / "placement.json").read_text())
    for prediction, message in (
        (None, "carries no prediction"),
        ({"gain": 1}, "its prediction cannot be read"),
    ):
        (folder / "bare.json").write_text(json.dumps({**bare, "prediction": prediction}))
        assert message in refused("--applied", folder / "bare.json")
    assert "was not in force in any window" in refused("--applied", folder / "first" / "placement.json")
    assert not (folder / "no").exists()
