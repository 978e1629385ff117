"""The deployment's files: what may stand in them, reading them, and where everything lies.

The only package that knows YAML. May rely on model and errors.
"""
