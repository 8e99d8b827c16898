"""Answer a file of OpenAI requests with a Mixture-of-Experts model, offline.

    python launch/generate.py --input in.jsonl --output out.jsonl --model DIR --ep 2

Each line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}} (or
/v1/completions). Answers are appended to the output as they are ready, in no certain order. A line that is wrong gets an
error line. Killed, at any time and by any means, the same command goes on where it was: nothing is lost or done twice.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    # Python puts launch/ first; the package lies beside it.
    sys.path.insert(0, str(ROOT))

from moe_runtime import cli
from moe_runtime.config import BatchConfig, EngineConfig
from moe_runtime.errors import MoeRuntimeError
from moe_runtime.server.batch import Summary, run_batch

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""

logger = logging.getLogger("moe_runtime.generate")


def main(argv: list[str]) -> int:
    """Parse and run. 0: every line has an answer or an error line; 1: it could not go on; 130: interrupted."""
    parser = cli.build_parser("launch/generate.py", __doc__ or "", (EngineConfig, BatchConfig))
    arguments = cli.parse(parser, argv)
    config, batch = arguments[EngineConfig], arguments[BatchConfig]
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    try:
        summary = asyncio.run(_run(config, batch))
    except MoeRuntimeError as error:
        logger.debug("traceback:", exc_info=error)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    print(f"{summary.num_requests} requests, {summary.num_failed} of them with an error: {batch.output}")
    return 0


async def _run(config: EngineConfig, batch: BatchConfig) -> Summary:
    task = asyncio.current_task()
    assert task is not None
    # Like Ctrl-C, so that the ranks are ended in order.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_batch(config, batch)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
