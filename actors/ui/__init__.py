"""The status page of a deployment: static files that need nothing from elsewhere, and the numbers they show."""
