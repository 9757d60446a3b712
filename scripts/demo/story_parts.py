"""The parts of the demo stories. `{a|b}` is a choice; `{name}` and the like are slots drawn once a
story.
"""

from __future__ import annotations

NAMES = {
    "she": [
        "Lily",
        "Anna",
        "Mia",
        "Clara",
        "Rosa",
        "Ella",
        "Nora",
        "Ivy",
        "Maya",
        "Zoe",
        "Lucy",
        "Ruby",
        "Emma",
        "Grace",
        "Tara",
        "Hazel",
    ],
    "he": [
        "Tom",
        "Ben",
        "Max",
        "Sam",
        "Leo",
        "Oscar",
        "Finn",
        "Jack",
        "Theo",
        "Hugo",
        "Noah",
        "Felix",
        "Milo",
        "Owen",
        "Toby",
        "Adam",
    ],
}
ANIMALS = [
    "rabbit",
    "fox",
    "bear",
    "mouse",
    "squirrel",
    "hedgehog",
    "duck",
    "owl",
    "cat",
    "puppy",
    "turtle",
    "frog",
    "badger",
    "deer",
    "otter",
    "goat",
    "pony",
    "penguin",
]
PEOPLE = {
    "she": ["girl", "girl", "girl", "baker", "gardener"],
    "he": ["boy", "boy", "boy", "baker", "fisherman"],
}
TRAITS = [
    "kind",
    "brave",
    "curious",
    "clever",
    "shy",
    "cheerful",
    "gentle",
    "careful",
    "quiet",
    "playful",
    "patient",
    "friendly",
    "honest",
    "little",
]
PLACES = [
    ("in a small house near the forest", "garden"),
    ("on a green hill by the sea", "beach"),
    ("in a village with a tall clock", "market"),
    ("next to a wide blue lake", "lake"),
    ("at the edge of a big wood", "old oak tree"),
    ("in a red barn on a farm", "field"),
    ("under the roof of an old mill", "river"),
    ("in a town between two mountains", "bridge"),
    ("in a little cottage with a yellow door", "garden"),
    ("on a quiet street behind the school", "park"),
]
HOBBIES = [
    "sing songs",
    "paint pictures",
    "look at the stars",
    "bake bread",
    "climb trees",
    "read books",
    "build little boats",
    "plant flowers",
    "collect smooth stones",
    "tell stories",
    "dance in the rain",
    "watch the clouds",
    "fly a kite",
    "play the drum",
]
THINGS = [
    "red ball",
    "blue kite",
    "wooden boat",
    "silver bell",
    "woolly hat",
    "green scarf",
    "golden key",
    "picture book",
    "small drum",
    "shiny stone",
    "yellow umbrella",
    "toy train",
    "soft blanket",
    "old lantern",
    "music box",
    "paper star",
]
FOODS = [
    "apple pie",
    "warm soup",
    "honey cake",
    "fresh bread",
    "berry jam",
    "hot porridge",
    "carrot cake",
    "sweet pancakes",
    "cheese toast",
    "plum tart",
]
FRIENDS = ["best friend", "good friend", "neighbor", "cousin", "old friend"]

OPENINGS = [
    "{Once upon a time, there|Long ago, there|There once|There} {was a {trait} {kind} named {name}|lived a {trait} {kind} named {name}}. "
    "{they} lived {place} and {loved|liked} to {hobby}. {Every day|Every morning|After breakfast}, {name} went to the {spot} "
    "{with {their} {bond} {friend_name}|to {hobby}|and said hello to everyone}.",
    "{name} was a {trait} {kind} who lived {place}. {name} {loved|liked} to {hobby}{ more than anything else|, and {they} did it every day|}. "
    "{{their} {bond} was a {friend_trait} {friend_kind} named {friend_name}.|{name} had a {bond} named {friend_name}, a {friend_trait} {friend_kind}.}",
    "{One day|One sunny morning|One cold morning|One windy afternoon}, a {trait} {kind} named {name} {woke up early|looked out of the window}. "
    '{they} lived {place}. "{What a lovely day|Today I want to {hobby}|I wonder what will happen today}," said {name}.',
]

_FIND = "looked {under the bed|behind the door|in the tall grass|near the {spot}}"
PLOTS = [
    [
        "One day, {name} could not find {their} {thing}. {they} "
        + _FIND
        + " and {in every corner|all over the house}, but it was not there. "
        '{name} {was very sad|began to cry|felt sad}. "{Where is my {thing}?|Who has seen my {thing}?}" {they} asked.',
        '{friend_name} the {friend_kind} came to help. "{Do not worry|Do not cry}, {name}," said {friend_name}. "We will {find it|look for it} together." '
        "They walked to the {spot} and looked {very carefully|for a long time}. {At last|Then|Suddenly}, {friend_name} saw something {under a leaf|behind a big stone|in the grass}. "
        "It was the {thing}!",
        '{name} was so happy that {they} {jumped up and down|laughed out loud|hugged {friend_name}}. "Thank you, {friend_name}! You are a {true|wonderful|very good} friend," said {name}. '
        "Then they {shared some {food}|went home and ate {food}|played with the {thing} until the sun went down}.",
    ],
    [
        "One {rainy|snowy|windy} day, {name} {met|saw} {friend_name}, a {friend_trait} {friend_kind}, near the {spot}. {friend_name} was {cold and wet|tired and hungry|all alone}. "
        '"{Are you all right|What is wrong}?" asked {name}. "I {am lost|lost my way|cannot find my home}," said {friend_name}.',
        '{name} {gave {friend_name} {their} {thing}|took {friend_name} by the hand} and {said|answered}, "Come with me. I have {food} at home." '
        "They {walked|ran} to the house of {name}, and {they} made {food} {for both of them|and a cup of tea}. Soon {friend_name} felt {warm|better|happy} again.",
        "The next day, they {looked for|found} the way to the home of {friend_name} together. The family of {friend_name} was {very happy|so glad}. "
        '"Thank you for helping," they said, and they gave {name} a {other}. From that day on, {name} and {friend_name} were {best friends|good friends}.',
    ],
    [
        'One day, {name} {found|saw} a {thing} near the {spot}. It was {beautiful|very old|bright and new}. "{I want to keep it|It is so pretty}," {they} thought. '
        "But then {name} {saw|heard} {friend_name} the {friend_kind}, who was {looking for something|crying}.",
        '"I have lost my {thing}," said {friend_name}. "My {grandmother|mother|father} gave it to me." {name} {thought for a moment|looked at the {thing}}. '
        '{they} wanted to keep it, but {they} knew that it {was not right|belonged to {friend_name}}. "Here it is," said {name}. "I found it near the {spot}."',
        '{friend_name} {smiled|was very happy}. "Thank you for being honest," said {friend_name}. "{Do you want to play with me|Will you come and eat {food} with me}?" '
        '"Yes, please," said {name}. {They played together all day.|They laughed and talked until the evening.|And so {name} got something better than a {thing}: a new friend.}',
    ],
    [
        "{name} wanted to {build|make} a {boat|little house|big kite|swing} for {friend_name}, because it was the birthday of {friend_name}. But {it was hard work|it was not easy}. "
        "The first time, it {broke|fell down}. The second time, it {broke|fell down} again. {name} was {tired|angry|sad} and wanted to stop.",
        'Then {a wise old owl|an old turtle|{their} grandmother} {came by|sat down next to {them}} and said, "{Try once more, and go slowly|Take your time, and do not give up}." '
        "{name} {took a deep breath|nodded} and tried again. {they} worked {slowly and carefully|all day long}. This time, it {worked|was perfect}!",
        'When {friend_name} saw the present, {friend_they} {clapped {friend_their} hands|could not believe it}. "{Did you make this for me|Is this really for me}?" asked {friend_name}. '
        '"Yes," said {name}, "happy birthday!" They ate {food} and {sang|danced} until {the moon came out|it was time for bed}.',
    ],
    [
        "One {night|evening}, {name} heard a {strange|loud|soft} {sound|noise} {outside|near the {spot}}. {they} was {a little afraid|scared|afraid}. "
        '"{What is that|Who is there}?" {they} whispered. {name} took {their} {old lantern|lantern} and went to {look|see}.',
        "{It was dark, and the wind was cold.|The moon was bright, and everything was quiet.} Then {name} saw something {small|move} behind {a bush|a tree}. It was {friend_name} the {friend_kind}! "
        '"{I am sorry|Please do not be afraid}," said {friend_name}. "I {was looking for|dropped} my {thing} and could not see in the dark."',
        '{name} laughed. "I thought you were a monster!" {they} said. With the lantern, they {soon found|found} the {thing} {in the grass|under a tree}. '
        "Then they {drank warm milk|ate {food}} and {told each other stories|laughed about the monster}. After that night, {name} was not afraid of the dark any more.",
    ],
    [
        '{name} and {friend_name} both wanted to play with the {thing}. "It is mine," said {name}. "No, I had it first," said {friend_name}. '
        "They pulled and pulled, and {then|suddenly} the {thing} {broke|fell into the water|tore}. {Now nobody could play with it.|They looked at each other and were silent.}",
        '{name} {felt bad|was sorry}. {they} went to {friend_name} and said, "I am sorry. I should have shared with you." "I am sorry too," said {friend_name}. '
        '"{Let us fix it|Can we fix it} together?" They worked {all afternoon|for an hour}, and in the end the {thing} was {as good as new|even better than before}.',
        "{Now they take turns|From then on, they took turns}. First {name} plays, and then {friend_name} plays. {Sharing is more fun than being alone.|They both learned that sharing makes everyone happy.}",
    ],
    [
        "One day, {name} wanted to make {food}, but there was {no flour|no milk|nothing} left in the kitchen. So {they} took a basket and walked to the market. "
        'On the way, {they} met {friend_name} the {friend_kind}. "Where are you going?" asked {friend_name}. "I am going to the market, because I want to make {food}," said {name}.',
        '"I can help you," said {friend_name}. "I have {flour|milk|plenty of everything} at home, and I love {food}." So they went to the house of {friend_name} and began to cook. '
        "{name} {stirred|mixed everything}, and {friend_name} {lit the fire|washed the bowls|sang a song}. Soon the whole house smelled {wonderful|sweet|very good}.",
        "They ate the {food} {together|at the big table}, and it was {delicious|the best that they had ever had}. They gave what was left to {the neighbors|a hungry {friend_kind}|their friends}. "
        '"{Everything tastes better with a friend|Let us do this again tomorrow}," said {name}.',
    ],
    [
        '{name} wanted to learn how to {swim|whistle|ride a bicycle|skate}. "I can teach you," said {friend_name}. They went to the {spot}, and {name} tried. '
        '{they} tried once, and {it did not work|{they} fell}. {they} tried twice, and {it did not work|{they} fell} again. "I will never learn it," said {name}.',
        '"{Everyone falls at first|It was hard for me too}," said {friend_name}. "{Watch me, and then try again|You only need to practice}." So {name} practiced {every day|every morning}. '
        "On Monday it was hard. On {Tuesday|Wednesday} it was a little easier. And on {Friday|Sunday}, {name} could do it!",
        '"Look at me!" shouted {name}. {friend_name} {clapped|cheered}. "I knew that you could do it," {friend_they} said. {name} was {very proud|proud and happy}, '
        "and to thank {friend_name}, {they} {gave {friend_them} a {other}|made {food} for {friend_them}}.",
    ],
]

ENDINGS = [
    "That night, {name} {lay in bed and smiled|went to sleep with a smile}. It had been a {good|wonderful|very good} day. The end.",
    "And they all lived happily ever after. The end.",
    "{name} learned that {it is good to help others|a good friend is a treasure|being kind makes everyone happy|you should never give up}. The end.",
    "And from that day on, {name} and {friend_name} {met at the {spot} every day|did everything together|were never lonely again}. The end.",
    '"{Good night|See you tomorrow}, {friend_name}," said {name}. "{Good night|See you tomorrow}, {name}," said {friend_name}. The end.',
]
