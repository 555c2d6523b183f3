"""Parts of a mesh strategy, each for one task, such as training steps, data loaders, checkpoints and callbacks."""
