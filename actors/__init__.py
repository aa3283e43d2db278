"""The deployment: Ray Serve actors around LMDeploy's engine."""
