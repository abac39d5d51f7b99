"""The words of the topics: a Markdown file for each, in a folder for each language.

A file has the question as `# heading`, the parts of `attemper.lesson.topics.PARTS` and the picture's labels as `## headings`, and
in some parts `### headings`: a follow-up question, the name of a statement or of a voice. `{name}` stands for a measured figure,
`{name:pm}` for it with its uncertainty, `[@name]` for a source.
"""
