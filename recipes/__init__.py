"""Recipes: the typed description of a run, and the YAML files that are shipped."""
