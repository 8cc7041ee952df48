"""The dummy tokens of the paper's Table 8 and the ways in which patterns look at what stands beside them."""

CATEGORIES = ("EMAIL", "DART", "FB_USERID", "PHONE_NUMBER", "CREDIT_CARD_NUMBER", "SSN", "USER")

# Half-open range of characters and the category there.
Span = tuple[int, int, str]

# A dummy token bounds as the text did that it replaced: else each replacement could uncover one more, without end.
TOKEN = f"<(?:{'|'.join(CATEGORIES)})>"
NUMBER_TOKEN = "<(?:PHONE_NUMBER|CREDIT_CARD_NUMBER|SSN|DART)>"
