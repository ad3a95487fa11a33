"""What every room stands on: the machine, findings, errors, the door to the outside."""
