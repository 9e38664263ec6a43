"""The embedded engine: transformers on a paged KV pool of any layout."""
