"""Log text -> what went wrong first, with the line it stands on and the fix. Reads only; asks the machine nothing."""
