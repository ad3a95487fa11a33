"""Log text -> findings: what went wrong first, the line that shows it, and the fix. Asks the machine nothing."""
