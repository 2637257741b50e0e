"""A job's report as one HTML page: charts as data (pure), written by templates/report.html.j2.

The template escapes every text: names and lines of evidence are whatever users and programs wrote.
"""
