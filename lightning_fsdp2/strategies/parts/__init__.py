"""Parts of the strategies, each for one task, such as training steps, data loaders, checkpoints and callbacks."""
