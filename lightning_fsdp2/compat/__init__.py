"""All code that relies on names which torch, Lightning or transformers do not promise to keep."""
