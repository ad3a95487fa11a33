"""What all screens and pages share."""
