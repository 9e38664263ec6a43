"""One vLLM engine, in one process, driven over its standard input: a line of JSON is a request, a line of JSON is an answer.

{"add": "r1", "ids": [3, 4, 5], "max_tokens": 8, "params": {...}}   -> {"done": "r1", "tokens": [...], "reason": "length", ...}
{"abort": "r1"}
{"stats": 1}                                                        -> {"stats": 1, "free": 99, "blocks": 100, ...}
{"quit": 1}
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    config = json.loads(sys.argv[1])
    llm = LLM(**config)
    engine = llm.llm_engine
    core: Any = engine.engine_core.engine_core
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()

    def say(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")

    say(ready=True)
    first: dict[str, float] = {}
    fruitless = False
    preempted: dict[str, int] = {}
    while True:
        busy = core.scheduler.has_requests()
        try:  # as vLLM's own loop: it waits for requests, and 1 ms for transfers where there is nothing to compute
            word = json.loads(lines.get(timeout=None if not busy else 0.001 if fruitless else 0.0))
        except queue.Empty:
            word = {}
        if "quit" in word:
            break
        if "add" in word:
            sampling = SamplingParams(
                temperature=0, max_tokens=word["max_tokens"], ignore_eos=True, detokenize=False, logprobs=word.get("logprobs"),
                extra_args={"kv_transfer_params": word["params"]} if word.get("params") else None,
            )  # fmt: skip
            engine.add_request(word["add"], {"prompt_token_ids": word["ids"]}, sampling)
        if "abort" in word:
            engine.abort_request([word["abort"]])
            say(aborted=word["abort"])
        if "reset" in word:
            say(reset=engine.reset_prefix_cache())
        if "stats" in word:
            pool = core.scheduler.kv_cache_manager.block_pool
            connector = core.scheduler.connector
            worker = _rank(core)
            say(
                stats=word["stats"], free=pool.get_num_free_blocks(), blocks=pool.num_gpu_blocks,
                bytes_in=worker.bytes_in if worker else 0, path=worker.last.path if worker and worker.last else "",
                received=_ended(worker and worker.last), sent=_ended(worker and worker.sent),
                known=len(connector._schedule._sending) + len(connector._schedule._loading) if connector else 0,
                preempted=sum(preempted.values()),
            )  # fmt: skip
        outputs = engine.step() if core.scheduler.has_requests() else []
        fruitless = not outputs
        preempted |= {name: request.num_preemptions for name, request in core.scheduler.requests.items()}
        for output in outputs:
            name = output.request_id
            if output.outputs and output.outputs[0].token_ids:
                first.setdefault(name, time.monotonic())
            if output.finished:
                say(
                    done=name, tokens=list(output.outputs[0].token_ids), reason=output.outputs[0].finish_reason,
                    cached=output.num_cached_tokens, first=first.get(name), last=time.monotonic(),
                    params=output.kv_transfer_params, logprobs=_logprobs(output.outputs[0].logprobs),
                )  # fmt: skip
    engine.engine_core.shutdown()
    say(bye=True)


def _logprobs(given: Any) -> list[dict[int, float]]:
    """Of each token of an answer, what was asked for: token -> its logarithm of probability."""
    return [{token: each.logprob for token, each in position.items()} for position in given or ()]


def _rank(core: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "_rank", None) if has_kv_transfer_group() else None


def _ended(ended: Any) -> dict[str, Any] | None:
    return None if ended is None else {key: getattr(ended, key) for key in ("transfer", "seconds", "computed", "at")}


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Take lines until whoever drives the engine closes its end, or is gone."""
    for line in sys.stdin:
        lines.put(line)
    lines.put('{"quit": 1}')


if __name__ == "__main__":
    main()
