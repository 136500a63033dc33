"""The Hydra configuration groups, as package data: what ``train.py`` and ``opensearch train`` compose."""
