"""For `bench/validation.py --clockwork`: in a worker's process, the model's steps take known times and compute nothing.

Python imports a module of this name at its start from a folder in PYTHONPATH. All else of the worker is as ever: scheduler, pages, transfer, hand-over.
"""

import sys

if any(part == "regauge.serve.worker_process" for part in sys.orig_argv):
    import time
    from collections.abc import Callable, Sequence

    import torch

    from regauge.engines.local.model import LocalModel, Segment

    WORD = 5_000
    """A token with text of its own: each comes in a piece of its own."""

    def forward(
        self: LocalModel,
        token_ids: Sequence[int],
        segments: Sequence[Segment],
        store: object,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Sleep as long as a step of the bundled model takes on one core, about."""
        assert len(token_ids)
        assert store is not None
        prompts = [s for s in segments if s.count > 1]
        decoding = len(segments) - len(prompts)
        seconds = 0.045 + 0.02 * decoding if decoding else 0.0
        if prompts:
            seconds += 0.07 + 0.0025 * sum(s.count for s in prompts) + 1e-7 * sum(s.count * s.start for s in prompts)
        time.sleep(seconds)
        for layer in range(self.num_layers):
            if on_layer is not None:
                on_layer(layer)
        logits = torch.zeros(len(segments), self.vocab)
        logits[:, WORD] = 1.0
        return logits

    LocalModel.forward = forward  # type: ignore[assignment]
