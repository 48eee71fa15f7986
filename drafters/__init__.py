"""Drafters: one module set per architecture, used for training, decoding and export."""
