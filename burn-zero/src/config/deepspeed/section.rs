//! One object of the file, read against the table of its keys.

use super::json::Json;
use crate::config::{ConfigError, IgnoredKey};

/// What a key means here.
#[derive(Clone, Copy)]
pub(super) enum Meaning {
    /// It is read. The text is what to put there instead of `"auto"`.
    Read(&'static str),
    /// It is listed as ignored, with the reason.
    Ignored(&'static str),
    /// It would change what is trained: refused with the reason, unless its value asks for nothing.
    Refused(fn(&Json) -> bool, &'static str),
}

/// A table of keys.
pub(super) type Keys = &'static [(&'static str, Meaning)];

/// An object whose keys are all known.
pub(super) struct Section<'a> {
    path: String,
    entries: &'a [(String, Json)],
    keys: Keys,
}

impl<'a> Section<'a> {
    /// Checks the keys of `json` against `keys` and adds those without meaning to `ignored`.
    pub(super) fn open(
        path: &str,
        json: &'a Json,
        keys: Keys,
        ignored: &mut Vec<IgnoredKey>,
    ) -> Result<Self, ConfigError> {
        let Json::Object(entries) = json else {
            let place = if path.is_empty() {
                "the configuration"
            } else {
                path
            };
            return Err(wrong_type(place, json, "an object"));
        };
        let section = Self {
            path: path.to_owned(),
            entries,
            keys,
        };
        for (index, (key, value)) in entries.iter().enumerate() {
            if entries[..index].iter().any(|(earlier, _)| earlier == key) {
                return Err(ConfigError::DuplicateKey {
                    path: section.path_of(key),
                });
            }
            section.check(key, value, ignored)?;
        }
        Ok(section)
    }

    fn check(
        &self,
        key: &str,
        value: &Json,
        ignored: &mut Vec<IgnoredKey>,
    ) -> Result<(), ConfigError> {
        let path = self.path_of(key);
        let Some((_, meaning)) = self.keys.iter().find(|(name, _)| *name == key) else {
            return Err(ConfigError::UnknownKey {
                path,
                nearest: self.nearest(key),
            });
        };
        let reason = match *meaning {
            Meaning::Read(put) if *value == Json::Text("auto".to_owned()) => {
                return Err(ConfigError::Auto { path, put });
            }
            Meaning::Read(_) => return Ok(()),
            Meaning::Ignored(reason) => reason,
            Meaning::Refused(harmless, instead) if !harmless(value) => {
                return Err(ConfigError::Unsupported {
                    path,
                    value: value.preview(),
                    instead,
                });
            }
            Meaning::Refused(..) => "asks for nothing",
        };
        ignored.push(IgnoredKey {
            path,
            reason: reason.to_owned(),
        });
        Ok(())
    }

    fn nearest(&self, key: &str) -> Option<String> {
        let distance = |name: &str| strsim::damerau_levenshtein(name, key);
        let names = self.keys.iter().map(|(name, _)| *name);
        names.min_by_key(|name| distance(name)).map(str::to_owned)
    }

    /// The path of one of its keys.
    pub(super) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() {
            return key.to_owned();
        }
        format!("{}.{key}", self.path)
    }

    /// The value of a key, unless it is missing or null.
    pub(super) fn value(&self, key: &str) -> Option<&'a Json> {
        debug_assert!(
            self.keys.iter().any(|(name, _)| *name == key),
            "{key} is in no table"
        );
        let entry = self.entries.iter().find(|(name, _)| name == key);
        entry
            .map(|(_, value)| value)
            .filter(|value| **value != Json::Null)
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.get(key, "true or false", |value| match value {
            Json::Bool(value) => Some(*value),
            _ => None,
        })
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.get(key, "a number", number)
    }

    /// An integer, which may be written as `5e8`.
    pub(super) fn integer(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        /// Integers up to here are exact in f64, as they are in JSON.
        const LARGEST: f64 = (1u64 << 53) as f64;

        let Some(value) = self.number(key)? else {
            return Ok(None);
        };
        if value.fract() != 0.0 || !(0.0..=LARGEST).contains(&value) {
            return Err(self.invalid(key, value.to_string(), "an integer from 0 to 2^53"));
        }
        Ok(Some(value as u64))
    }

    /// An integer of 32 bits.
    pub(super) fn small_integer(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let small = |value: u64| {
            u32::try_from(value).map_err(|_| self.invalid(key, value.to_string(), "below 2^32"))
        };
        self.integer(key)?.map(small).transpose()
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.get(key, "a text", |value| match value {
            Json::Text(value) => Some(value.as_str()),
            _ => None,
        })
    }

    /// The `type` of a section that configures something by it. Without one the section would be dropped with all that it says;
    /// only one that says nothing may be without.
    pub(super) fn typed(&self) -> Result<Option<&'a str>, ConfigError> {
        let name = self.text("type")?;
        if name.is_none() && self.says_something() {
            return Err(self.invalid(
                "type",
                "missing".to_owned(),
                "there, as the section has other keys",
            ));
        }
        Ok(name)
    }

    fn says_something(&self) -> bool {
        self.entries.iter().any(|(_, value)| *value != Json::Null)
    }

    pub(super) fn pair(&self, key: &str) -> Result<Option<(f64, f64)>, ConfigError> {
        self.get(key, "two numbers", |value| match value {
            Json::Array(values) => match values.as_slice() {
                [first, second] => Some((number(first)?, number(second)?)),
                _ => None,
            },
            _ => None,
        })
    }

    /// An error about the value of a key.
    pub(super) fn invalid(&self, key: &str, value: String, expected: &'static str) -> ConfigError {
        ConfigError::InvalidValue {
            path: self.path_of(key),
            value,
            expected,
        }
    }

    fn get<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        read(value)
            .map(Some)
            .ok_or_else(|| wrong_type(&self.path_of(key), value, expected))
    }
}

fn number(value: &Json) -> Option<f64> {
    match value {
        Json::Number(value) => Some(*value),
        _ => None,
    }
}

fn wrong_type(path: &str, value: &Json, expected: &'static str) -> ConfigError {
    ConfigError::WrongType {
        path: path.to_owned(),
        value: value.preview(),
        expected,
    }
}
