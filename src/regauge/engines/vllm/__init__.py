"""vLLM: an out-of-tree KV connector. See docs/engines/vllm.md."""
