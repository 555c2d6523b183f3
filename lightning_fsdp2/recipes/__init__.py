"""The order of the passes: one recipe per strategy, each a function of (model, mesh, config) that fits on a screen."""
