"""KV layouts as data: the vocabulary, model presets, short forms. No I/O on memory."""
