"""One replay by ai-dynamo, in its own environment: a JSON object of options as the argument, a JSON object on standard output. See peers_dynamo.py."""

from __future__ import annotations

import json
import os
import resource
import sys
import time

os.environ["DYN_LOG"] = "error"  # a line for each decision, formatted on its time, otherwise


def main() -> None:
    begun = time.process_time()
    from dynamo.mocker import MockEngineArgs  # type: ignore[import-not-found]
    from dynamo.replay import run_trace_replay  # type: ignore[import-not-found]

    imported = time.process_time()
    asked = json.loads(sys.argv[1])
    engines = {role: MockEngineArgs(worker_type=role, **asked["engine"]) for role in ("prefill", "decode")}
    started, wall = time.process_time(), time.perf_counter()
    report = run_trace_replay(
        asked["trace"],
        prefill_engine_args=engines["prefill"],
        decode_engine_args=engines["decode"],
        **asked["replay"],
    )
    ended = time.process_time()
    print(
        json.dumps(
            {
                "import_cpu_s": imported - begun,
                "cpu_s": ended - started,
                "wall_s": time.perf_counter() - wall,
                "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                "report": {name: value for name, value in report.items() if isinstance(value, int | float)},
            }
        )
    )


if __name__ == "__main__":
    main()
