"""The book of rules: the words of every finding, as data."""
