"""Texts with personal data to measure the anonymizer on, made without a look at its words and patterns.

Numbers come from the rules of numbering: the `phonenumbers` package's example numbers of 62 countries with other last
digits, and payment cards from ranges of issuers. Every second template belongs to the half "seen", whose misses were
looked at when rules were mended; the other half was only measured. In a template ⟦…⟧ marks what is to be replaced.
"""

import random
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import cycle

import phonenumbers
from phonenumbers import PhoneNumber, PhoneNumberFormat, PhoneNumberType

COUNTRIES = (
    "AE AR AT AU BD BE BG BR CA CH CL CN CO CZ DE DK EE EG ES FI FR GB GR HK HR HU ID IE IL IN IS IT JP KE KR LT LU LV "
    "MA MX MY NG NL NO NZ PE PH PK PL PT RO RS RU SA SE SG SI SK TH TR UA US VN ZA"
).split()
TYPES = (PhoneNumberType.FIXED_LINE, PhoneNumberType.MOBILE)

# Templates of a language go with its countries; English ones with all.
BEFORE = """Tel ⟦n⟧
Tel. ⟦n⟧ (9am to 5pm)
Tel.: ⟦n⟧, Fax on request
tel ⟦n⟧, open daily
T: ⟦n⟧
T ⟦n⟧ | E jane at our site
Ph ⟦n⟧
Ph. ⟦n⟧ or by post
Ph: ⟦n⟧
Phone ⟦n⟧ for a quote.
Phone no. ⟦n⟧
Phone number: ⟦n⟧
Phone Number(s): ⟦n⟧
Phone - ⟦n⟧
Telephone/Fax: ⟦n⟧
Telephone No: ⟦n⟧
Telephone enquiries: ⟦n⟧
Telephone (day): ⟦n⟧
Fax ⟦n⟧
Fax number is ⟦n⟧, thanks
F: ⟦n⟧
M: ⟦n⟧
Mob ⟦n⟧
Mobile - ⟦n⟧
Mobile no: ⟦n⟧
mobile number ⟦n⟧.
Cell: ⟦n⟧
Cellphone ⟦n⟧
Cell # ⟦n⟧
cell phone is ⟦n⟧
Direct line: ⟦n⟧
Direct dial ⟦n⟧
Switchboard ⟦n⟧
Hotline: ⟦n⟧
Helpline ⟦n⟧ (24 hours)
Help desk ⟦n⟧
Customer service: ⟦n⟧
Customer care number ⟦n⟧
WhatsApp ⟦n⟧
Whatsapp me on ⟦n⟧
Signal/Telegram: ⟦n⟧
Viber ⟦n⟧
Text STOP to ⟦n⟧ to leave.
Text us at ⟦n⟧
Send an SMS to ⟦n⟧
sms ⟦n⟧
Call ⟦n⟧ today!
Call us toll free ⟦n⟧
Please call now on ⟦n⟧.
You can call Jane on ⟦n⟧ after six.
Calls are answered on ⟦n⟧ all week.
For tickets call the box office: ⟦n⟧
Ring ⟦n⟧ and ask for Bob.
Just ring me on ⟦n⟧
give me a ring at ⟦n⟧
give us a bell on ⟦n⟧ mate
gimme a call: ⟦n⟧
Dial ⟦n⟧ from any landline.
In an emergency dial ⟦n⟧
You may reach me at ⟦n⟧ at any time.
I can be reached on ⟦n⟧ until Friday.
Contact number: ⟦n⟧
Contact: Jane Doe, ⟦n⟧
Contact the office on ⟦n⟧.
For details ring Mrs Smith on ⟦n⟧
RSVP by phone: ⟦n⟧
RSVP ⟦n⟧
Bookings: ⟦n⟧
Reservations ⟦n⟧
Emergency contact ⟦n⟧
After hours: ⟦n⟧
Voicemail ⟦n⟧
My number is ⟦n⟧
my new number's ⟦n⟧, save it
here's my number: ⟦n⟧
Her phone number was ⟦n⟧ back then.
he left a message at ⟦n⟧ yesterday
Landline ⟦n⟧
Home: ⟦n⟧
Work phone: ⟦n⟧
☎ ⟦n⟧
📞 ⟦n⟧
✆ ⟦n⟧
Phone:¶⟦n⟧

**Phone:** ⟦n⟧
*Tel*: ⟦n⟧
Phone/WhatsApp: ⟦n⟧
Tel/Mob: ⟦n⟧
Jane Doe (phone ⟦n⟧)
Sales team (tel. ⟦n⟧)
Interested? Phone or text ⟦n⟧
For sale, two bikes. Pls txt ⟦n⟧
Lost cat! Reward! Please phone Jane at ⟦n⟧
Room to let, call evenings ⟦n⟧
If no answer try my mobile ⟦n⟧
Fax your order to ⟦n⟧
Our telephone number has changed to ⟦n⟧
The number to call is ⟦n⟧
Toll-free: ⟦n⟧
Freephone ⟦n⟧
Callers outside the city should dial ⟦n⟧
Pager: ⟦n⟧
Beeper ⟦n⟧
Handphone: ⟦n⟧
Office tel no: ⟦n⟧
tel no ⟦n⟧
Tel № ⟦n⟧
Reception: tel ⟦n⟧""".split("\n")

AFTER = """⟦n⟧ (phone)
⟦n⟧ (mobile)
⟦n⟧ (fax)
⟦n⟧ (tel)
⟦n⟧ (cell), leave a message
⟦n⟧ (voice)
⟦n⟧ tel
⟦n⟧ phone
⟦n⟧ fax
⟦n⟧ mobile, best after six
⟦n⟧ cell
⟦n⟧ is my number
⟦n⟧ is my phone number
⟦n⟧ is the number to call
⟦n⟧ is our new telephone number.
⟦n⟧ - call me!
⟦n⟧, call or text
⟦n⟧ - phone after 6pm
⟦n⟧ - text only please
⟦n⟧, phone or WhatsApp
⟦n⟧ (call after nine)
⟦n⟧ [mobile]
⟦n⟧ <-- my cell
⟦n⟧ (office phone)
⟦n⟧ (home phone)
⟦n⟧ was her phone number
⟦n⟧ – Telephone
⟦n⟧ (WhatsApp)
⟦n⟧ call anytime
⟦n⟧ on the phone""".split("\n")

RECORDS = """{"name": "Jane", "phone": "⟦n⟧"}
{"mobileNumber":"⟦n⟧","id":3}
{"tel": "⟦n⟧", "fax": null}
{'telephone': '⟦n⟧'}
phone_number=⟦n⟧
phone = "⟦n⟧"
telephone: ⟦n⟧
fax_number: '⟦n⟧'
contactPhone: "⟦n⟧"
user.phone = '⟦n⟧';
<phone>⟦n⟧</phone>
<Telephone type="work">⟦n⟧</Telephone>
<td>Telephone</td><td>⟦n⟧</td>

<dt>Phone</dt>¶<dd>⟦n⟧</dd>
<span itemprop="telephone">⟦n⟧</span>
<a href="tel:⟦n⟧">call</a>
<b>Tel:</b> ⟦n⟧<br>
<strong>Phone</strong>: ⟦n⟧
| Phone | ⟦n⟧ |
| Mobile | ⟦n⟧ |
| Fax:    | ⟦n⟧ |
Phone\t⟦n⟧
Mobile phone\t⟦n⟧
Name:\tJane Doe¶Phone:\t\t⟦n⟧

TEL;TYPE=CELL:⟦n⟧
TEL;WORK;VOICE:⟦n⟧
caller=⟦n⟧ duration=32s
INFO incoming call from ⟦n⟧ answered
WARN sms to ⟦n⟧ not delivered
[call] dialing ⟦n⟧
msisdn=⟦n⟧
Phone........: ⟦n⟧
Phone ........ ⟦n⟧
PHONE: ⟦n⟧
TELEPHONE ⟦n⟧
Jane Doe | 12 High Street | Tel ⟦n⟧
Jane Doe · Sales · T. ⟦n⟧
--¶Jane Doe¶Example Ltd.¶Tel: ⟦n⟧¶Fax: ⟦n2⟧




Phone: ⟦n⟧ / ⟦n2⟧
Tel ⟦n⟧ or ⟦n2⟧
Tel. ⟦n⟧, ⟦n2⟧
Phone: ⟦n⟧; Fax: ⟦n2⟧
INSERT INTO users (name, phone) VALUES ('Jane', '⟦n⟧');

name,phone¶Jane Doe,⟦n⟧
Name | Telephone¶Jane Doe | ⟦n⟧

setPhone("⟦n⟧")
print("Phone:", "⟦n⟧")
\\phone{⟦n⟧}
\\fax{⟦n⟧}
phone=⟦n⟧&lang=en
curl -d phone=⟦n⟧""".split("\n")

LANGUAGES = {
    "DE AT CH": """Telefon: ⟦n⟧
Telefonnummer ⟦n⟧
Tel.-Nr.: ⟦n⟧
Handy: ⟦n⟧
Handynummer ⟦n⟧
Mobil ⟦n⟧
Rufnummer: ⟦n⟧
Fon ⟦n⟧
Bitte rufen Sie uns an: ⟦n⟧
Telefax: ⟦n⟧
Erreichbar unter ⟦n⟧
unter der Nummer ⟦n⟧ erreichbar
Ruf mich an unter ⟦n⟧
telefonisch unter ⟦n⟧""",
    "FR BE CH": """Tél. : ⟦n⟧
Tél ⟦n⟧
Téléphone : ⟦n⟧
Portable : ⟦n⟧
Mobile : ⟦n⟧
Télécopie ⟦n⟧
Appelez le ⟦n⟧
Appelez-nous au ⟦n⟧
joignable au ⟦n⟧
numéro de téléphone ⟦n⟧""",
    "ES AR MX CO CL PE": """Teléfono: ⟦n⟧
Teléfonos: ⟦n⟧
Tfno. ⟦n⟧
Tlf: ⟦n⟧
Móvil ⟦n⟧
Celular: ⟦n⟧
Llame al ⟦n⟧
Llámanos al ⟦n⟧
número de teléfono ⟦n⟧
Contacto: ⟦n⟧""",
    "PT BR": """Telefone: ⟦n⟧
Telemóvel ⟦n⟧
Celular: ⟦n⟧
Ligue para ⟦n⟧
Fone: ⟦n⟧
Contato: ⟦n⟧""",
    "IT": """Telefono: ⟦n⟧
Cellulare ⟦n⟧
Cell. ⟦n⟧
Chiamare il ⟦n⟧
Numero di telefono: ⟦n⟧
Chiama il numero ⟦n⟧""",
    "NL BE": "Telefoon: ⟦n⟧\nTelefoonnummer ⟦n⟧\nMobiel: ⟦n⟧\nBel ⟦n⟧\nU kunt ons bellen op ⟦n⟧\nGSM: ⟦n⟧",
    "SE": "Telefon: ⟦n⟧\nMobil: ⟦n⟧\nRing ⟦n⟧\nTelefonnummer: ⟦n⟧\nTfn ⟦n⟧\nTel.nr ⟦n⟧",
    "NO DK": "Telefon: ⟦n⟧\nMobil ⟦n⟧\nTlf. ⟦n⟧\nTlf: ⟦n⟧\nRing ⟦n⟧\nTelefonnummer: ⟦n⟧",
    "FI": "Puhelin: ⟦n⟧\nPuh. ⟦n⟧\nGSM ⟦n⟧\nSoita ⟦n⟧",
    "PL": "Telefon: ⟦n⟧\nTel. kom. ⟦n⟧\nKomórka: ⟦n⟧\nZadzwoń: ⟦n⟧\nNumer telefonu: ⟦n⟧\nKom. ⟦n⟧",
    "CZ SK": "Telefon: ⟦n⟧\nMobil: ⟦n⟧\nVolejte ⟦n⟧\nTelefonní číslo: ⟦n⟧",
    "HU": "Telefon: ⟦n⟧\nTelefonszám: ⟦n⟧\nMobil: ⟦n⟧\nHívjon: ⟦n⟧",
    "RO": "Telefon: ⟦n⟧\nMobil: ⟦n⟧\nSunați la ⟦n⟧\nNumăr de telefon: ⟦n⟧",
    "HR RS SI": "Telefon: ⟦n⟧\nMobitel: ⟦n⟧\nBroj telefona: ⟦n⟧\nNazovite ⟦n⟧",
    "TR": "Telefon: ⟦n⟧\nCep: ⟦n⟧\nCep telefonu ⟦n⟧\nArayın: ⟦n⟧",
    "RU UA BG": "Телефон: ⟦n⟧\nтел. ⟦n⟧\nТел: ⟦n⟧\nмоб. ⟦n⟧\nЗвоните ⟦n⟧\nНомер телефона: ⟦n⟧\nЗвоните по номеру ⟦n⟧\nфакс ⟦n⟧",
    "GR": "Τηλέφωνο: ⟦n⟧\nΤηλ. ⟦n⟧\nΚινητό: ⟦n⟧\nΚαλέστε ⟦n⟧",
    "IL": "טלפון: ⟦n⟧\nנייד ⟦n⟧\nטל: ⟦n⟧\nפקס ⟦n⟧",
    "JP": "電話: ⟦n⟧\n電話番号 ⟦n⟧\nTEL ⟦n⟧\n携帯:⟦n⟧\nTEL:⟦n⟧\nFAX ⟦n⟧",
    "CN HK": "电话:⟦n⟧\n电话 ⟦n⟧\n手机: ⟦n⟧\n联系电话:⟦n⟧\n電話:⟦n⟧\n传真: ⟦n⟧",
    "KR": "전화: ⟦n⟧\n전화번호 ⟦n⟧\n휴대폰: ⟦n⟧\n연락처: ⟦n⟧",
    "EG AE SA MA": "هاتف: ⟦n⟧\nالهاتف ⟦n⟧\nجوال: ⟦n⟧\nاتصل على ⟦n⟧",
    "VN": "Điện thoại: ⟦n⟧\nĐT: ⟦n⟧\nSĐT ⟦n⟧\nGọi ⟦n⟧",
    "TH": "โทร ⟦n⟧\nโทร. ⟦n⟧\nโทรศัพท์: ⟦n⟧\nมือถือ ⟦n⟧",
    "ID MY": "Telepon: ⟦n⟧\nTelp. ⟦n⟧\nHP: ⟦n⟧\nHubungi ⟦n⟧",
}

PLAIN = """Write or come by, ⟦i⟧, any day.
⟦i⟧
Jane Doe, ⟦i⟧
(⟦i⟧)
"⟦i⟧"
[⟦i⟧]
- ⟦i⟧
Jane: ⟦i⟧.
| Jane | ⟦i⟧ | Paris |
Jane,⟦i⟧,Paris
Jane\t⟦i⟧\tParis
_⟦i⟧_
**⟦i⟧**
<li>⟦i⟧</li>
tel:⟦i⟧
call ⟦i⟧!
Phone:⟦i⟧
phone ⟦i⟧; office shut
⟦i⟧ / ⟦i2⟧
⟦i⟧, ⟦i2⟧""".replace("\\t", "\t").split("\n")

EXTENDED = """Tel. ⟦n ext. 12⟧
Phone: ⟦n ext 1234⟧
Phone: ⟦n x123⟧
Tel: ⟦nx123⟧
call ⟦n, ext. 45⟧
Call ⟦n extension 301⟧ for help
Phone ⟦n (ext. 7)⟧
tel ⟦n (x 42)⟧
Tel ⟦i ext. 12⟧
Phone: ⟦i x9⟧
reach me at ⟦i, extension 20⟧
⟦i ext 5555⟧
Phone: ⟦n #12⟧
Tel.: ⟦n Ext: 12⟧
Tel: ⟦n, Ext 12⟧
Fax ⟦n;ext=12⟧""".split("\n")

CARDS = {  # prefixes, lengths, groupings
    "Visa": (["4"], [16], ["4 4 4 4"]),
    "Visa of 13 or 19 digits": (["4"], [13, 19], ["13", "19", "4 4 4 4 3"]),
    "Mastercard": (["51", "52", "53", "54", "55", "2221", "2345", "2720"], [16], ["4 4 4 4"]),
    "American Express": (["34", "37"], [15], ["4 6 5"]),
    "Diners Club": (["300", "305", "3095", "36", "38", "39"], [14], ["4 6 4"]),
    "Discover": (["6011", "644", "649", "65"], [16], ["4 4 4 4"]),
    "JCB": (["3528", "3589"], [16], ["4 4 4 4"]),
    "UnionPay": (["62"], [16, 17, 18, 19], ["4 4 4 4", "4 4 4 4 3", "6 13"]),
    "Maestro": (["5018", "5020", "5038", "5893", "6304", "6759", "6761", "6763"], [12, 13, 14, 15, 16, 18, 19],
                ["4 4 4", "4 4 5", "4 6 5", "4 4 4 4", "4 4 4 4 3"]),
    "Mir": (["2200", "2204"], [16], ["4 4 4 4"]),
    "RuPay": (["60", "65", "81", "82", "508"], [16], ["4 4 4 4"]),
    "Verve": (["5061", "6500"], [16, 18, 19], ["4 4 4 4", "4 4 4 4 3"]),
    "Troy": (["9792"], [16], ["4 4 4 4"]),
    "Elo": (["636297", "650031", "509000"], [16], ["4 4 4 4"]),
}  # fmt: skip
CARD_TEXTS = """Card: ⟦c⟧
card number ⟦c⟧, exp 04/29
My card no. is ⟦c⟧ thanks
Visa ⟦c⟧
cc: ⟦c⟧ cvv 123
⟦c⟧
Paid with ⟦c⟧ last week.
{"card_number": "⟦c⟧", "cvc": "123"}
{"pan":"⟦c⟧"}
order,card¶12,⟦c⟧
| Jane | ⟦c⟧ | 04/29 |
please charge ⟦c⟧ for it
(⟦c⟧)
number=⟦c⟧&exp=0429
<card>⟦c⟧</card>
Credit card ending? Full: ⟦c⟧.
4242 is the test one, mine is ⟦c⟧
INFO payment pan=⟦c⟧ ok
Kreditkarte: ⟦c⟧
carte bancaire ⟦c⟧
número de tarjeta ⟦c⟧
debit card #⟦c⟧""".replace("¶", "\n").split("\n")

MAILS = """⟦jane.doe@example.org⟧
Write to ⟦jane.doe@example.org⟧.
<⟦jane.doe@example.org⟧>
mailto:⟦jane.doe@example.org⟧?subject=hi
"Jane Doe" <⟦jane_doe+list@mail.example.co.uk⟧>,
_⟦jane.doe@example.org⟧_
__⟦jane.doe@example.org⟧__
*⟦jane.doe@example.org⟧*
**⟦jane.doe@example.org⟧**
`⟦jane.doe@example.org⟧`
~~⟦jane.doe@example.org⟧~~
(⟦JANE@EXAMPLE.ORG⟧)
⟦"jane doe"@example.org⟧
⟦"jane.doe"@example.org⟧
⟦jane@müller-example.de⟧
⟦jürgen@example.de⟧
⟦почта@пример.рф⟧
{"email":"⟦j@example.io⟧"}
email=⟦jane@example.org⟧&x=1
⟦a@example.com⟧,⟦b@example.com⟧;⟦c@example.com⟧
⟦a@example.com⟧/⟦b@example.com⟧
From: Jane Doe [mailto:⟦jane@example.org⟧]
Reply-To:⟦jane@example.org⟧
commit 12ab¶Author: Jane <⟦jane@example.org⟧>
Jane Doe;⟦jane@example.org⟧;Paris
E⟦-mail⟧: no
'⟦o'jane@example.org⟧'
⟦123456@example.org⟧
⟦jane@sub-domain.example.museum⟧...
| ⟦jane@example.org⟧ |
<a href="mailto:⟦jane@example.org⟧">⟦jane@example.org⟧</a>
jane at example dot org and ⟦jane@example.org⟧!
Jane Doe ⟦jane@example.org⟧ 2021-03-04
# Copyright (C) 2019 Jane Doe <⟦jane@example.org⟧>
⟦jane!doe@example.org⟧
contact:⟦jane@example.org⟧¶web: example.org""".replace("¶", "\n").split("\n")
MAILS.remove("E⟦-mail⟧: no")

USERS = """thanks ⟦@janedoe⟧!
⟦@janedoe⟧ what do you think?
(⟦@jane_doe⟧)
RT ⟦@jane⟧: so true
cc ⟦@jane⟧ ⟦@bob99⟧
**⟦@janedoe⟧**
_⟦@janedoe⟧_
*⟦@janedoe⟧*
* ⟦@octocat⟧ made their first contribution
- ⟦@octocat⟧ fixed it
* Fix the reader by ⟦@octocat⟧ in #12
[⟦@octocat⟧](https://example.org)
Thanks to ⟦@octocat⟧, ⟦@hubot⟧ and ⟦@mona-lisa⟧.
Follow us: ⟦@example⟧
"⟦@jane⟧ is here"
⟦@jane⟧¶class of 2012, miss you all
⟦@jane⟧¶public opinion is wrong here
⟦@jane⟧¶fun times last night
⟦@jane⟧¶¶Hello there
1. ⟦@jane⟧ 12 points
.⟦@jane⟧ hello
/cc ⟦@jane⟧
> ⟦@jane⟧ wrote
Instagram: ⟦@jane.doe⟧
twitter ⟦@Jane⟧
<p>⟦@jane⟧</p>
via ⟦@jane⟧.
@ home with ⟦@jane⟧
⟦@jane⟧'s idea
⟦@Jane⟧: done
hey⟦ @⟧
{"user": "⟦@jane⟧"}
~ ⟦@jane⟧
#5 (⟦@jane⟧)
⟦@jane⟧¶function is not my thing, sorry
⟦@jane⟧¶def not what I meant""".replace("¶", "\n").split("\n")
USERS.remove("hey⟦ @⟧")

SSNS = """SSN: ⟦s⟧
SSN ⟦s⟧
ssn=⟦s⟧
social security number ⟦s⟧
Social Security No. ⟦s⟧
Social Security #: ⟦s⟧
{"ssn": "⟦s⟧"}
soc. sec. no. ⟦s⟧
SS# ⟦s⟧
his SSN is ⟦s⟧.
SSN/EIN: ⟦s⟧
Social-Security-Number: ⟦s⟧""".split("\n")

FACEBOOK = """see ⟦facebook.com/jane.doe.5⟧
see ⟦https://www.facebook.com/jane.doe.5⟧.
<⟦https://facebook.com/profile.php?id=100001234567890⟧>
⟦https://m.facebook.com/profile.php?id=100001234567890⟧
⟦https://www.facebook.com/groups/123456/user/100001234567⟧/
⟦facebook.com/groups/cats/user/100001234567⟧
hi ⟦@[100001234567:2048:Jane Doe]⟧!
(⟦fb.com/jane.doe⟧)""".split("\n")


@dataclass(frozen=True)
class Case:
    """A text, what it becomes, and what it is a case of; `country` of telephones, the issuer of cards."""

    half: str
    category: str
    kind: str
    country: str
    text: str
    wanted: str


def telephones(country: str, draw: random.Random) -> Iterator[PhoneNumber]:
    """Valid numbers of a country, its examples with other last digits, fixed and mobile in turn."""
    for kind in cycle(TYPES):
        example = phonenumbers.example_number_for_type(country, kind)
        digits = phonenumbers.national_significant_number(example)
        for _ in range(50):
            other = phonenumbers.parse(f"+{example.country_code}{digits[:-4]}{draw.randrange(10**4):04}")
            if phonenumbers.is_valid_number(other):
                example = other
                break
        yield example


def at_home(number: PhoneNumber, draw: random.Random) -> str:
    """A number as it is written in its own country."""
    national = phonenumbers.format_number(number, PhoneNumberFormat.NATIONAL)
    parted = re.sub(r"\D+", " ", national).strip()
    return draw.choice(
        [national] * 4
        + [parted, parted.replace(" ", "-"), parted.replace(" ", "."), re.sub(r"\D", "", national)]
        + [re.sub("[ -]", draw.choice("\u00a0\u2013\u2011"), national), national.replace(" ", "-", 1)]
    )


def abroad(number: PhoneNumber, draw: random.Random) -> str:
    """A number with its country code."""
    shown = phonenumbers.format_number(number, PhoneNumberFormat.INTERNATIONAL)
    code, rest = shown.split(" ", 1)
    trunk = phonenumbers.PhoneMetadata.metadata_for_region(
        phonenumbers.region_code_for_number(number) or "US"
    ).national_prefix
    ways = [shown, shown, phonenumbers.format_number(number, PhoneNumberFormat.E164), shown.replace("-", " ")]
    ways += [shown.replace(" ", sign) for sign in (".", "-", "\u00a0")]
    ways += [re.sub("[ -]", sign, shown) for sign in ("\u2013", "\u2011")]
    ways += [
        f"00{code[1:]} {rest}",
        f"00 {code[1:]} {rest}",
        f"(00{code[1:]}) {rest}",
        f"({code}) {rest}",
        f"{code}-{rest}",
    ]
    if trunk == "0":
        ways += [f"{code} (0){rest}", f"{code} (0) {rest}", f"{code}(0){rest}"]
    return draw.choice(ways)


def card(prefix: str, length: int, draw: random.Random) -> str:
    digits = prefix + "".join(str(draw.randrange(10)) for _ in range(length - len(prefix) - 1))
    total = sum(int(d) if place % 2 else sum(divmod(2 * int(d), 10)) for place, d in enumerate(reversed(digits)))
    return digits + str(-total % 10)


def _grouped(digits: str, draw: random.Random, groupings: list[str]) -> str:
    fitting = [g for g in groupings if sum(map(int, g.split())) == len(digits)]
    if not fitting or draw.random() < 0.3:
        return digits
    parts, sign = draw.choice(fitting).split(), draw.choice("  -\u00a0\u2011\u2013")
    edges = [sum(map(int, parts[:place])) for place in range(len(parts) + 1)]
    return sign.join(digits[low:high] for low, high in zip(edges, edges[1:], strict=False))


def _cases(template: str, fill: dict[str, str], category: str) -> tuple[str, str]:
    """The text and what it becomes: letters n, i, c and s that stand alone, or first, in a mark are filled."""

    def value(match: re.Match[str]) -> str:
        inside = match[1]
        name = re.match(r"(n2?|i2?|c|s)(?=x\d|[^a-z]|$)", inside) if fill else None
        return fill[name[1]] + inside[name.end() :] if name else inside

    template = template.replace("¶", "\n")
    return re.sub("⟦(.+?)⟧", value, template), re.sub("⟦(.+?)⟧", f"<{category}>", template)


def unseen(seed: int = 1, known: Collection[str] = COUNTRIES) -> Iterator[Case]:
    """All cases of both halves, with the telephones of the `known` countries."""
    draw = random.Random(seed)
    streams = {country: telephones(country, draw) for country in known}
    halves = ("seen", "unseen")

    def phones(kind: str, templates: list[str], countries: list[str]) -> Iterator[Case]:
        for place, template in enumerate(templates):
            for country in countries if template else ():
                if country not in known:
                    continue
                first, second = next(streams[country]), next(streams[country])
                fill = {"n": at_home(first, draw), "n2": at_home(second, draw)}
                fill |= {"i": abroad(first, draw), "i2": abroad(second, draw)}
                text, wanted = _cases(template, fill, "PHONE_NUMBER")
                yield Case(halves[place % 2], "PHONE_NUMBER", kind, country, text, wanted)

    yield from phones("word before", BEFORE, COUNTRIES)
    yield from phones("word after", AFTER, COUNTRIES)
    yield from phones("record", RECORDS, COUNTRIES)
    yield from phones("country code", PLAIN, COUNTRIES)
    yield from phones("extension", EXTENDED, COUNTRIES)
    for countries, templates in LANGUAGES.items():
        for _ in range(3):
            yield from phones("other language", templates.split("\n"), countries.split())
    for place, template in enumerate(CARD_TEXTS):
        for issuer, (prefixes, lengths, groupings) in CARDS.items():
            for _ in range(3):
                number = card(draw.choice(prefixes), draw.choice(lengths), draw)
                text, wanted = _cases(template, {"c": _grouped(number, draw, groupings)}, "CREDIT_CARD_NUMBER")
                yield Case(halves[place % 2], "CREDIT_CARD_NUMBER", "card", issuer, text, wanted)
    for place, template in enumerate(SSNS):
        for sign in "-- \u2013\u2011.":
            area = draw.choice([*range(1, 666), *range(667, 900)])
            number = f"{area:03}{sign}{draw.randrange(1, 100):02}{sign}{draw.randrange(1, 10000):04}"
            text, wanted = _cases(template, {"s": number}, "SSN")
            yield Case(halves[place % 2], "SSN", "SSN", "", text, wanted)
    for category, templates in (("EMAIL", MAILS), ("USER", USERS), ("FB_USERID", FACEBOOK)):
        for place, template in enumerate(templates):
            text, wanted = _cases(template, {}, category)
            yield Case(halves[place % 2], category, category, "", text, wanted)
