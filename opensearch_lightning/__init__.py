"""Training components on Lightning for multimodal deep-search agents (the OpenSearch-VL recipe, arXiv 2605.05185)."""

__version__ = "0.1.0"
