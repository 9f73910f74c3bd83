"""Results of many nights: kept, shown as asv pages, searched for trends."""
