"""Recipes, one per strategy: functions of (model, mesh, config) that call the functions of ``parallel/`` in order."""
