"""SGLang: the layout out of its pools (`pools`), and what lets it run without a GPU (`cpu`). Nothing of SGLang is patched."""
