//! Whole numbers of any length in decimal digits, as Python's integers are: a recognizer can write a number of any length.

use super::pattern::Pattern;

static DECIMAL: Pattern = Pattern::new(r"\p{Nd}");

/// The value of a decimal digit of any script.
pub(super) fn digit(character: char) -> Option<u8> {
    if character.is_ascii() {
        return character.to_digit(10).map(|value| value as u8);
    }
    if !DECIMAL.has(character) {
        return None;
    }
    // Unicode has the digits of a script in order, from 0 to 9 (Unicode Standard, 4.6); those before say which one it is.
    let before = (1..60).map_while(|back| char::from_u32(u32::from(character) - back)).take_while(|&c| DECIMAL.has(c)).count();
    Some((before % 10) as u8)
}

/// `^\d+(\.\d+)?$`.
pub(super) fn is_number(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.chars().all(|character| digit(character).is_some());
    match text.split_once('.') {
        Some((whole, fraction)) => digits(whole) && digits(fraction),
        None => digits(text),
    }
}

/// Least significant digit first, without leading zeros; none for zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Whole(Vec<u8>);

impl Whole {
    pub fn new(number: u32) -> Self {
        let mut whole = Whole(Vec::new());
        whole.add(number, 0);
        whole
    }

    pub fn power_of_ten(zeros: usize) -> Self {
        let mut whole = Whole(Vec::new());
        whole.add(1, zeros);
        whole
    }

    /// `text × 10^zeros`, where `text` is a number such as `12`, `1.5`, `2.` or `.5` and the product is whole.
    pub fn scaled(text: &str, zeros: usize) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let digits = |text: &str| text.chars().map(digit).collect::<Option<Vec<u8>>>();
        let (mut all, mut fraction) = (digits(whole)?, digits(fraction)?);
        while fraction.last() == Some(&0) {
            fraction.pop();
        }
        if fraction.len() > zeros {
            return None;
        }
        let padding = zeros - fraction.len();
        all.extend(fraction);
        all.extend(std::iter::repeat_n(0, padding));
        all.reverse();
        let mut scaled = Whole(all);
        scaled.trim();
        Some(scaled)
    }

    pub fn is_zero(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it is a multiple of `10^zeros`.
    pub fn ends_in_zeros(&self, zeros: usize) -> bool {
        self.0.iter().take(zeros).all(|&digit| digit == 0)
    }

    /// Adds `number × 10^zeros`.
    pub fn add(&mut self, number: u32, zeros: usize) {
        let (mut carry, mut at) = (number, zeros);
        while carry > 0 {
            if self.0.len() <= at {
                self.0.resize(at + 1, 0);
            }
            let sum = u32::from(self.0[at]) + carry;
            self.0[at] = (sum % 10) as u8;
            (carry, at) = (sum / 10, at + 1);
        }
    }

    /// Multiplies what is below a thousand by `10^zeros`, and leaves the thousands as they are.
    pub fn multiply_below_thousand(&mut self, zeros: usize) {
        let below = self.0.iter().take(3).rev().fold(0, |sum, &digit| sum * 10 + u32::from(digit));
        self.0.iter_mut().take(3).for_each(|digit| *digit = 0);
        self.trim();
        self.add(below, zeros);
    }

    fn trim(&mut self) {
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }

    pub fn text(&self) -> String {
        match self.is_zero() {
            true => "0".into(),
            false => self.0.iter().rev().map(|digit| char::from(b'0' + digit)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_of_every_script_have_their_value() {
        for text in ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "๐๑๒๓๔๕๖๗๘๙", "０１２３４５６７８９", "𞥐𞥑𞥒𞥓𞥔𞥕𞥖𞥗𞥘𞥙"]
        {
            assert_eq!(text.chars().map(digit).collect::<Vec<_>>(), (0..10).map(Some).collect::<Vec<_>>());
        }
        assert_eq!(['a', '½', '²', 'Ⅳ', '一', '-'].map(digit), [None; 6]);
    }

    #[test]
    fn numbers_are_scaled_where_the_product_is_whole() {
        let scaled = |text, zeros| Whole::scaled(text, zeros).map(|whole| whole.text());
        assert_eq!(scaled("007", 0).unwrap(), "7");
        assert_eq!(scaled("1.50", 1).unwrap(), "15");
        assert_eq!(scaled("2.", 2).unwrap(), "200");
        assert_eq!(scaled(".25", 3).unwrap(), "250");
        assert_eq!(scaled("0.0", 3).unwrap(), "0");
        assert_eq!(scaled("٣.٥", 1).unwrap(), "35");
        for text in [".", "", "1.2.3", "$5", "1.234"] {
            assert_eq!(scaled(text, 2), None, "{text}");
        }
    }

    #[test]
    fn arithmetic_is_that_of_integers() {
        for start in [0_u64, 1, 9, 99, 999, 1000, 20_005, 999_999] {
            for (number, zeros) in [(0, 0), (1, 0), (19, 0), (999, 3), (90, 1)] {
                let mut whole = Whole::scaled(&start.to_string(), 0).unwrap();
                whole.add(number, zeros);
                assert_eq!(whole.text(), (start + u64::from(number) * 10_u64.pow(zeros as u32)).to_string());
            }
            for zeros in [2, 3, 6] {
                let mut whole = Whole::scaled(&start.to_string(), 0).unwrap();
                whole.multiply_below_thousand(zeros);
                let product = start / 1000 * 1000 + start % 1000 * 10_u64.pow(zeros as u32);
                assert_eq!(whole.text(), product.to_string());
                assert_eq!(whole.ends_in_zeros(2), product.is_multiple_of(100));
            }
        }
        assert_eq!(Whole::power_of_ten(33).text(), format!("1{}", "0".repeat(33)));
        assert!(Whole::new(0).is_zero() && Whole::new(0).ends_in_zeros(2) && !Whole::new(50).ends_in_zeros(2));
    }
}
