"""THE ORDER OF THE PASSES: one recipe per strategy, each a function of (model, mesh, config) on one screen."""
