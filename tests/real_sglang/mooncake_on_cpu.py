"""SGLang's server with its own backend mooncake_tcp as a CPU can run it: page numbers would else go to memory that CUDA has pinned.

`python mooncake_on_cpu.py` in place of `python -m sglang.launch_server`. Every process that it spawns imports this file as its main module.
"""

import runpy

from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

MooncakeKVSender.supports_host_tensor_indices = False

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
