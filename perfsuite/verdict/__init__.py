"""What a measurement means against its baseline. Pure: neither disk nor clock."""
