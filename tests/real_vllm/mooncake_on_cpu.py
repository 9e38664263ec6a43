"""vLLM's own MooncakeConnector, loaded by module path: it asks torch for the number of the accelerator, of which a CPU has none."""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

__all__ = ["MooncakeConnector"]

torch.accelerator.current_device_index = lambda: 0
