"""The drawing of reports: style, bands over seeds, differences with intervals, performance profiles."""
