"""All code that uses private names of torch, Lightning, transformers and other libraries."""
