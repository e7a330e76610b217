"""What the guard makes of records in company that losses alone do not show."""
