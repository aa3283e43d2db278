"""What is generated of the Helm chart; `python -m helm` writes it."""
