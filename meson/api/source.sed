# What Doxygen is to see of a header: the labels of the comments in bold, on lines of their own in the page, and no attributes.
s/\[\[nodiscard\]\] //g
/^ *\/\/\//{
  s/(^ *\/\/\/ |  )(Ordering|Capture|Threads|Throws|Source|Ordering, Capture)( \([^)]*\))?:/\1<br>**\2\3:**/g
}
