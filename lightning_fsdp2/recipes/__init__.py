"""Recipes, one per strategy: functions of (model, mesh, config) that apply the passes to a model in order."""
