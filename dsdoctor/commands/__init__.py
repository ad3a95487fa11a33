"""What happens behind each command: the file has the name of the command. Joins the rooms, prints nothing."""
