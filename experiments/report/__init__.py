"""What commands leave behind: tables, CSV files, figures and fits."""
