"""Wrappers of all private names that the package uses: names of torch, Lightning, transformers and other libraries."""
